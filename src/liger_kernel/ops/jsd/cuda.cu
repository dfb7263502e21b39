// Jensen-Shannon divergence on CUDA, one block a row: both inputs are read once and the gradient is written once, in 16-byte vectors
// between such boundaries where the rows of all three lie alike (the elements before the first and after the last go one by one), else
// element by element. One barrier a row.
#include <algorithm>

#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/packed.cuh>
#include <liger_kernel/ops/jsd/plan.h>

namespace liger::jsd {
namespace {

#include <liger_kernel/ops/jsd/column.inl.h>

template <class T, Kind kKind, bool kVector>
__global__ void __launch_bounds__(kMaxThreads) forward_kernel(ForwardArgs a) {
  constexpr int kSize = kVector ? Vec<T>::kSize : 1;
  __shared__ float scratch[2][kMaxThreads / 32];
  const float scale = a.scale * (a.stats ? a.stats->inverse_count : 1.f);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const T* x = static_cast<const T*>(a.log_q) + row * a.q_stride;
    const T* y = static_cast<const T*>(a.log_p) + row * a.p_stride;
    T* dx = a.dx ? static_cast<T*>(a.dx) + row * a.dx_stride : nullptr;
    const bool ignored = a.target && a.target[row * a.target_stride] == a.ignore_index;  // of the row, so the whole block agrees
    float loss = 0;
    const auto derive = [&](float log_q, float log_p) {
      const Column<float> c = column<kKind, sizeof(T) == 2>(log_q, log_p, a.beta);
      loss += c.loss;
      const float d = kKind == Kind::kForward ? -c.p : kKind == Kind::kReverse ? c.slope + c.q : c.slope;
      return d * scale;
    };
    int64_t head = 0, end = 0;  // the columns that vectors cover
    if constexpr (kVector) {
      head = std::min<int64_t>((16 - reinterpret_cast<uintptr_t>(x) % 16) % 16 / sizeof(T), a.cols);
      const int64_t vectors = (a.cols - head) / kSize;
      end = head + vectors * kSize;
#pragma unroll 2
      for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
        const int64_t j = head + v * kSize;
        float p[kSize], q[kSize] = {};
        if (!ignored) {
          Vec<T>::load_streaming(x + j).to_float(q);
          Vec<T>::load_streaming(y + j).to_float(p);
#pragma unroll
          for (int i = 0; i < kSize; ++i) q[i] = derive(q[i], p[i]);
        }
        if (dx) Vec<T>::from_float(q).store(dx + j);
      }
    }
    for (int64_t single = threadIdx.x; single < a.cols - (end - head); single += blockDim.x) {
      const int64_t j = single < head ? single : single + (end - head);
      const float d = ignored ? 0.f : derive(widen(x[j]), widen(y[j]));
      if (dx) dx[j] = narrow<T>(d);
    }
    // Scratches alternate, so that a warp still reading a row's sums does not meet those of the next row.
    const float total = block_sum(loss, scratch[turn]);
    if (threadIdx.x == 0) a.loss[row] = total * scale;
  }
}

template <bool kVector>
void launch(const ForwardArgs& a, const Host& host) {
  const unsigned grid = static_cast<unsigned>(a.rows < 0x7fffffff ? a.rows : 0x7fffffff);
  const int threads = threads_for(kVector ? a.cols * size_of(a.dtype) / 16 : a.cols);
  visit(a.dtype, [&]<class T>(Type<T>) {
    visit_kind(kind_of(a.beta), [&]<Kind kKind>() { forward_kernel<T, kKind, kVector><<<grid, threads, 0, stream_of(host)>>>(a); });
  });
  check_launch("jsd");
}

}  // namespace

void forward_cuda_vectors(const ForwardArgs& a, const Host& host) { launch<true>(a, host); }
void forward_cuda_elements(const ForwardArgs& a, const Host& host) { launch<false>(a, host); }

}  // namespace liger::jsd
