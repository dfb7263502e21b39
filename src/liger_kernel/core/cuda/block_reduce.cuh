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

// 1 / sqrt(x), both steps correctly rounded: rsqrtf may be two units off, which shows in fp32 results. Once a row, it costs nothing.
__device__ __forceinline__ float reciprocal_root(float x) { return __frcp_rn(__fsqrt_rn(x)); }

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
