// Squared ReLU on CUDA. Memory bound: x in and y out forward, dy and x in and dx out backward. Blocks cover the matrix as those of
// core/cuda/gated.cuh do: a thread has several accesses of each operand in flight before it computes anything.
// cuda_vector: 16-byte accesses; cuda_scalar: any alignment.
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/ops/relu_squared/relu_squared.h>

namespace liger::relu_squared {
namespace {

// A comparison with NaN is false, so that NaN takes the product.
__device__ __forceinline__ float value(float x) { return x <= 0.f ? 0.f : x * x; }
__device__ __forceinline__ float gradient(float dy, float x) { return x <= 0.f ? 0.f : (x + x) * dy; }

template <class T, class Access>
__global__ void __launch_bounds__(kGatedThreads) forward_kernel(ForwardArgs a, GatedPlan plan) {
  constexpr int kSize = Access::kSize;
  for (int64_t block = blockIdx.x; block < plan.blocks; block += gridDim.x) {
    const GatedSpot spot = gated_spot<kSize>(plan, block);
    if (spot.row >= a.rows) continue;
    const T* px = static_cast<const T*>(a.x) + spot.row * a.x_stride;
    T* py = static_cast<T*>(a.y) + spot.row * a.y_stride;

    // 1. Load everything.
    Access x[kGatedForwardAccesses];
#pragma unroll
    for (int v = 0; v < kGatedForwardAccesses; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j + kSize <= a.cols) x[v] = Access::load(px + j);
    }

    // 2. Compute and write; the last columns of a row that fill no vector go one by one.
#pragma unroll
    for (int v = 0; v < kGatedForwardAccesses; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j + kSize > a.cols) {
        for (int64_t k = j; k < a.cols; ++k) py[k] = narrow<T>(value(widen(px[k])));
        continue;
      }
      float xs[kSize];
      x[v].to_float(xs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) xs[i] = value(xs[i]);
      Access::from_float(xs).store_streaming(py + j);
    }
  }
}

// dx may lie over dy or x: a thread reads its elements before it writes them, and nobody else reads them.
template <class T, class Access>
__global__ void __launch_bounds__(kGatedThreads) backward_kernel(BackwardArgs a, GatedPlan plan) {
  constexpr int kSize = Access::kSize;
  for (int64_t block = blockIdx.x; block < plan.blocks; block += gridDim.x) {
    const GatedSpot spot = gated_spot<kSize>(plan, block);
    if (spot.row >= a.rows) continue;
    const T* pdy = static_cast<const T*>(a.dy) + spot.row * a.dy_stride;
    const T* px = static_cast<const T*>(a.x) + spot.row * a.x_stride;
    T* pdx = static_cast<T*>(a.dx) + spot.row * a.dx_stride;

    // 1. Load everything.
    Access dy[kGatedBackwardAccesses], x[kGatedBackwardAccesses];
#pragma unroll
    for (int v = 0; v < kGatedBackwardAccesses; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j + kSize > a.cols) continue;
      dy[v] = Access::load(pdy + j);
      x[v] = Access::load(px + j);
    }

    // 2. Compute and write.
#pragma unroll
    for (int v = 0; v < kGatedBackwardAccesses; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j + kSize > a.cols) {
        for (int64_t k = j; k < a.cols; ++k) pdx[k] = narrow<T>(gradient(widen(pdy[k]), widen(px[k])));
        continue;
      }
      float dys[kSize], xs[kSize];
      dy[v].to_float(dys);
      x[v].to_float(xs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) xs[i] = gradient(dys[i], xs[i]);
      Access::from_float(xs).store_streaming(pdx + j);
    }
  }
}

template <template <class> class Access>
void launch(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const GatedPlan plan = cover_gated(a.rows, a.cols, Access<T>::kSize, kGatedForwardAccesses);
    forward_kernel<T, Access<T>><<<gated_grid(plan), kGatedThreads, 0, stream_of(host)>>>(a, plan);
  });
  check_launch("relu_squared");
}
template <template <class> class Access>
void launch(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const GatedPlan plan = cover_gated(a.rows, a.cols, Access<T>::kSize, kGatedBackwardAccesses);
    backward_kernel<T, Access<T>><<<gated_grid(plan), kGatedThreads, 0, stream_of(host)>>>(a, plan);
  });
  check_launch("relu_squared");
}

}  // namespace

void forward_cuda_vector(const ForwardArgs& a, const Host& host) { launch<Vec>(a, host); }
void forward_cuda_scalar(const ForwardArgs& a, const Host& host) { launch<Single>(a, host); }
void backward_cuda_vector(const BackwardArgs& a, const Host& host) { launch<Vec>(a, host); }
void backward_cuda_scalar(const BackwardArgs& a, const Host& host) { launch<Single>(a, host); }

}  // namespace liger::relu_squared
