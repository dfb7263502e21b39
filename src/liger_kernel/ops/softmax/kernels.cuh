// The kernels of softmax: a row is read once, kept as 16-byte vectors in registers (what does not fit is read again), and exchanged
// once: forward as (largest, sum of exponentials relative to it), backward as the sum of dy y.
#pragma once
#include <liger_kernel/ops/softmax/plan.h>
#include <liger_kernel/core/cuda/held_row.cuh>

namespace liger::softmax {
namespace {

__device__ __forceinline__ float finite(float largest) { return largest == -INFINITY ? 0.f : largest; }

// (largest, sum of exp(x - largest)); the sum is relative to 0 while the largest is -inf. NaN is in the sum alone.
template <class T>
struct MergeSums {
  __device__ __forceinline__ static float2 identity() { return {-INFINITY, 0.f}; }
  __device__ __forceinline__ static float ratio(float from, float to) { return from == to ? 1.f : exp_for<T>(from - to); }
  __device__ __forceinline__ float2 operator()(float2 a, float2 b) const {
    const float m = fmaxf(a.x, b.x);
    return {m, a.y * ratio(a.x, m) + b.y * ratio(b.x, m)};
  }
};

// kCount values into the sums.
template <class T, int kCount>
__device__ __forceinline__ void take(float2& sums, const float (&x)[kCount]) {
  float m = sums.x;
#pragma unroll
  for (int i = 0; i < kCount; ++i) m = fmaxf(m, x[i]);
  if (m > sums.x) {
    sums.y *= exp_for<T>(sums.x - m);
    sums.x = m;
  }
  const float base = finite(m);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums.y += exp_for<T>(x[i] - base);
}

template <class T, class Access, int kHeld, int kCluster, bool kRest>
__global__ void __launch_bounds__(kMaxRowThreads, 2) forward_kernel(ForwardArgs a, int64_t length) {
  constexpr int kSize = Access::kSize;
  __shared__ RowInbox<kCluster> inbox;
  RowTeam<kCluster> team(inbox);
  for (int64_t row = team.first_row(); row < a.rows; row += team.row_step()) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    const RowSlice<T, Access> slice(x, a.cols, length, team.rank());
    const int begin = threadIdx.x, step = blockDim.x, kept = slice.count < kHeld * step ? static_cast<int>(slice.count) : kHeld * step;

    // 1. Load, and the sums: registers relative to their own largest, the rest as it comes.
    Access held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) held[i] = Access::load_streaming(x + slice.at(begin + i * step));
    }
    const float single = slice.single >= 0 ? widen(x[slice.single]) : -INFINITY;
    float2 sums{single, 0.f};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step >= kept) break;
      float v[kSize];
      held[i].to_float(v);
#pragma unroll
      for (int k = 0; k < kSize; ++k) sums.x = fmaxf(sums.x, v[k]);
    }
    const float base = finite(sums.x);
    sums.y = exp_for<T>(single - base);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step >= kept) break;
      float v[kSize];
      held[i].to_float(v);
#pragma unroll
      for (int k = 0; k < kSize; ++k) sums.y += exp_for<T>(v[k] - base);
    }
#pragma unroll 2
    for (int64_t i = begin + kHeld * step; kRest && i < slice.count; i += step) {
      float v[kSize];
      load_again<Access>(x + slice.at(i)).to_float(v);
      take<T>(sums, v);
    }
    sums = team.reduce(sums, MergeSums<T>());

    // 2. Write.
    const float largest = finite(sums.x), scale = __frcp_rn(sums.y);
    const auto write = [&](int64_t i, const Access& values) {
      float v[kSize];
      values.to_float(v);
#pragma unroll
      for (int k = 0; k < kSize; ++k) v[k] = exp_for<T>(v[k] - largest) * scale;
      Access::from_float(v).store(y + slice.at(i));
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) write(begin + i * step, held[i]);
    }
#pragma unroll 2
    for (int64_t i = begin + kHeld * step; kRest && i < slice.count; i += step) write(i, load_again<Access>(x + slice.at(i)));
    if (slice.single >= 0) y[slice.single] = narrow<T>(exp_for<T>(single - largest) * scale);
  }
}

template <class T, class Access, int kHeld, int kCluster, bool kRest>
__global__ void __launch_bounds__(kMaxRowThreads, 2) backward_kernel(BackwardArgs a, int64_t length) {
  constexpr int kSize = Access::kSize;
  __shared__ RowInbox<kCluster> inbox;
  RowTeam<kCluster> team(inbox);
  for (int64_t row = team.first_row(); row < a.rows; row += team.row_step()) {
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    const T* y = static_cast<const T*>(a.y) + row * a.y_stride;
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
    const RowSlice<T, Access> slice(dy, a.cols, length, team.rank());
    const int begin = threadIdx.x, step = blockDim.x, kept = slice.count < kHeld * step ? static_cast<int>(slice.count) : kHeld * step;

    // 1. Load, and the sum of dy y.
    Access held_dy[kHeld], held_y[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step >= kept) break;
      held_dy[i] = Access::load_streaming(dy + slice.at(begin + i * step));
      held_y[i] = Access::load_streaming(y + slice.at(begin + i * step));
    }
    const float single_dy = slice.single >= 0 ? widen(dy[slice.single]) : 0.f;
    const float single_y = slice.single >= 0 ? widen(y[slice.single]) : 0.f;
    float sum = single_dy * single_y;
    const auto add = [&](const Access& g, const Access& p) {
      float u[kSize], v[kSize];
      g.to_float(u), p.to_float(v);
#pragma unroll
      for (int k = 0; k < kSize; ++k) sum = fmaf(u[k], v[k], sum);
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) add(held_dy[i], held_y[i]);
    }
#pragma unroll 2
    for (int64_t i = begin + kHeld * step; kRest && i < slice.count; i += step)
      add(load_again<Access>(dy + slice.at(i)), load_again<Access>(y + slice.at(i)));
    sum = team.reduce({sum, 0.f}, AddPairs()).x;

    // 2. Write.
    const auto write = [&](int64_t i, const Access& g, const Access& p) {
      float u[kSize], v[kSize];
      g.to_float(u), p.to_float(v);
#pragma unroll
      for (int k = 0; k < kSize; ++k) v[k] *= u[k] - sum;
      Access::from_float(v).store(dx + slice.at(i));
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) write(begin + i * step, held_dy[i], held_y[i]);
    }
#pragma unroll 2
    for (int64_t i = begin + kHeld * step; kRest && i < slice.count; i += step)
      write(i, load_again<Access>(dy + slice.at(i)), load_again<Access>(y + slice.at(i)));
    if (slice.single >= 0) dx[slice.single] = narrow<T>(single_y * (single_dy - sum));
  }
}

}  // namespace
}  // namespace liger::softmax
