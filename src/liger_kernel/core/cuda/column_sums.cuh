// The second step of a deterministic sum over rows: blocks have written fp32 partial rows, which are added in a fixed order.
#pragma once
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/overlap.cuh>
#include <liger_kernel/core/cuda/vec.cuh>

namespace liger {
namespace {

// dw[column] = sum of the partial rows: 32 columns a block, 32 rows of threads, then a tree over the threads.
template <class D>
__global__ void __launch_bounds__(1024) sum_partials(const float* partial, D* dw, int64_t parts, int64_t cols) {
  __shared__ float sums[32][33];
  wait_for_previous_kernel();
  const int64_t column = blockIdx.x * int64_t{32} + threadIdx.x;
  float total = 0;
  if (column < cols) {
    for (int64_t part = threadIdx.y; part < parts; part += 32) total += partial[part * cols + column];
  }
  sums[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  total = warp_sum(sums[threadIdx.x][threadIdx.y]);
  const int64_t out = blockIdx.x * int64_t{32} + threadIdx.y;
  if (threadIdx.x == 0 && out < cols) dw[out] = narrow<D>(total);
}

inline void sum_rows(const float* partial, void* dw, DType dtype, int64_t parts, int64_t cols, const Host& host) {
  visit(dtype, [&]<class D>(Type<D>) {
    launch_early(sum_partials<D>, static_cast<unsigned>((cols + 31) / 32), dim3(32, 32), host, partial, static_cast<D*>(dw), parts, cols);
  });
}

}  // namespace
}  // namespace liger
