// Mean and rstd of a row that a block holds or reads, and the two sums through one barrier that they and the backward take.
#pragma once
#include <liger_kernel/core/cuda/block_reduce.cuh>

namespace liger::layer_norm {
namespace {

// Both sums for every thread, as block_sum; the block is one warp or an even number of them.
__device__ __forceinline__ float2 block_sum2(float2 v, float2* scratch) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    v.x += __shfl_xor_sync(~0u, v.x, lanes);
    v.y += __shfl_xor_sync(~0u, v.y, lanes);
  }
  const int warps = blockDim.x / 32;
  if (warps == 1) return v;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  float2 total{};
  for (int w = 0; w < warps; w += 2) {
    const float4 pair = *reinterpret_cast<const float4*>(scratch + w);
    total.x += pair.x + pair.z;
    total.y += pair.y + pair.w;
  }
  return total;
}

// hat = (x - mean - rest) rstd.
struct Statistics {
  float mean, rest, rstd;
};
// From sum(pivot), the row's sums of x - pivot and of its square. `pivot` is the mean of a few columns; where that is over a
// standard deviation from the row's, the sums are taken again about what they gave for the row's. x - pivot is exact where it
// matters, so neither mean nor variance cancels. All threads decide alike.
template <class Sum>
__device__ __forceinline__ Statistics statistics(float pivot, int64_t cols, float eps, Sum&& sum) {
  float correction, variance;
#pragma unroll 1
  for (int attempt = 0;; ++attempt) {
    const float2 about = sum(pivot);
    correction = about.x / static_cast<float>(cols);
    variance = about.y / static_cast<float>(cols) - correction * correction;
    if (attempt == 1 || correction * correction <= variance) break;
    pivot += correction;
  }
  const float rstd = reciprocal_root((variance < 0 ? 0.f : variance) + eps);
  // x - mean rounds once. What the mean itself was rounded by shows only where it is large against the row's spread.
  const float mean = pivot + correction, rest = pivot - mean + correction;
  return {.mean = mean, .rest = mean * mean <= variance ? 0.f : rest, .rstd = rstd};
}

}  // namespace
}  // namespace liger::layer_norm
