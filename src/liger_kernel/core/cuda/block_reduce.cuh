// Sums and maxima over a warp and over a block. Fixed order, so results repeat bit for bit.
#pragma once

namespace liger {

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v += __shfl_xor_sync(~0u, v, lanes);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, lanes));
  return v;
}

// 1 / sqrt(x) within a unit in the last place: rsqrtf, which may be two off, and a Newton step. 0 and infinity as rsqrtf.
__device__ __forceinline__ float reciprocal_root(float x) {
  const float r = rsqrtf(x), error = fmaf(-(x * r), r, 1.f);
  return fabsf(error) < 1.f ? fmaf(0.5f * r, error, r) : r;
}

// Every thread of a one-dimensional block gets the sum. `scratch` holds one float per warp (at most 32); two calls in a row need two
// scratches, or a
// __syncthreads() between them.
__device__ __forceinline__ float block_sum(float v, float* scratch) {
  v = warp_sum(v);
  const int warps = (blockDim.x + 31) / 32;
  if (warps == 1) return v;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  float total = 0;
  for (int w = 0; w < warps; ++w) total += scratch[w];
  return total;
}

}  // namespace liger
