// for_each on CUDA, for the structs of kernels.h.
#include <liger_kernel/core/cuda/launch.h>

#include <algorithm>

#include "kernels.h"

namespace example {
namespace {

template <class F>
__global__ void each(int64_t rows, int64_t cols, F f) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * cols; i += step) f(i / cols, i % cols);
}

}  // namespace

template <class F>
void for_each_cuda(const liger::Host& host, int64_t rows, int64_t cols, const F& f) {
  if (rows * cols == 0) return;
  constexpr int kThreads = 256;
  constexpr int64_t kMaxBlocks = int64_t{1} << 20;
  const int64_t blocks = std::min((rows * cols + kThreads - 1) / kThreads, kMaxBlocks);
  each<<<static_cast<unsigned>(blocks), kThreads, 0, liger::stream_of(host)>>>(rows, cols, f);
  liger::check_launch("cpp_train");
}

template void for_each_cuda(const liger::Host&, int64_t, int64_t, const Embed&);
template void for_each_cuda(const liger::Host&, int64_t, int64_t, const EmbedBackward&);
template void for_each_cuda(const liger::Host&, int64_t, int64_t, const CausalMask&);
template void for_each_cuda(const liger::Host&, int64_t, int64_t, const AdamW&);

}  // namespace example
