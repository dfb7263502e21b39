// The kernels of softmax: a row is read once, kept as 16-byte vectors in registers and shared memory (what does not fit there is read
// again), and exchanged once: forward as (largest, sum of exponentials relative to it), backward as the sum of dy y.
#pragma once
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/core/cuda/row_map.cuh>
#include <liger_kernel/core/cuda/packed.cuh>
#include <liger_kernel/ops/softmax/softmax.h>

namespace liger::softmax {
namespace {

// (largest, sum of exp(x - largest)); the sum is relative to 0 while the largest is -inf. NaN is in the sum alone.
template <class T>
struct MergeSums {
  using Exp = Exponential<sizeof(T) == 2>;
  __device__ __forceinline__ static float2 identity() { return {-INFINITY, 0.f}; }
  __device__ __forceinline__ float2 operator()(float2 a, float2 b) const {
    const float m = fmaxf(a.x, b.x);
    return {m, a.y * Exp::ratio(a.x, m) + b.y * Exp::ratio(b.x, m)};
  }
  __device__ __forceinline__ static float2 over_warp(float2 v) { return warp_log_sum<sizeof(T) == 2>(v); }
};

// Of a vector: its largest element, NaN aside.
template <class T>
__device__ __forceinline__ float largest_of(const Vec<T>& v) {
  return max_value<T>(max_word(v));
}
template <class T>
__device__ __forceinline__ float largest_of(const Single<T>& v) {
  return widen(v.raw);
}

// exp(x - largest) / sum
template <class T>
struct Normalized {
  __device__ __forceinline__ explicit Normalized(float2 sums) : exp(sums.x), factor(1 / sums.y) {}
  __device__ __forceinline__ float operator()(float x) const { return exp(x) * factor; }
  Exponential<sizeof(T) == 2> exp;
  float factor;
};

template <class T, class Access, int kHeld, bool kCluster, bool kRest>
__global__ void __launch_bounds__(row_threads(kRest), kRest ? 1 : 2) forward_kernel(ForwardArgs a, RowCut cut) {
  using Exp = Exponential<sizeof(T) == 2>;
  constexpr int kSize = Access::kSize;
  extern __shared__ uint4 memory[];
  __shared__ RowInbox<kCluster> inbox;
  RowTeam team(inbox);
  for (int64_t row = team.first_row(); row < a.rows; row += team.row_step()) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    const RowSlice<T, Access> slice(x, a.cols, cut.length, team.rank());
    const int begin = threadIdx.x, step = blockDim.x, kept = slice.count < kHeld * step ? static_cast<int>(slice.count) : kHeld * step;
    const RowRest<T, Access> rest{x, memory, int64_t{kHeld} * step, cut.shared};
    const auto of_rest = [&](auto&& f) {
      if constexpr (kRest) rest.for_each(slice.count, f);
    };

    // 1. Load, and the sums: registers relative to their own largest, the rest as it comes.
    if constexpr (kRest) {
      rest.ask(slice);
      commit_copies();
    }
    Access held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) held[i] = Access::load_streaming(x + slice.at(begin + i * step));
    }
    const float single = slice.single >= 0 ? widen(x[slice.single]) : -INFINITY;
    float2 sums{single, 0.f};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) sums.x = fmaxf(sums.x, largest_of(held[i]));
    }
    const auto add = [&](const Exp& e, const Access& values) {
      float v[kSize];
      values.to_float(v);
#pragma unroll
      for (int k = 0; k < kSize; ++k) sums.y += e(v[k]);
    };
    const Exp of_held(sums.x);
    sums.y = of_held(single);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) add(of_held, held[i]);
    }
    if constexpr (kRest) wait_copies(0);
    of_rest([&](int64_t i) {
      const Access values = rest(slice, i);
      const float m = fmaxf(sums.x, largest_of(values));
      sums = {m, sums.y * Exp::ratio(sums.x, m)};
      add(Exp(m), values);
    });
    sums = team.reduce(sums, MergeSums<T>());

    // 2. Write.
    const Normalized<T> result(sums);
    const auto write = [&](int64_t i, const Access& values) {
      float v[kSize];
      values.to_float(v);
#pragma unroll
      for (int k = 0; k < kSize; ++k) v[k] = result(v[k]);
      Access::from_float(v).store(y + slice.at(i));
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) write(begin + i * step, held[i]);
    }
    of_rest([&](int64_t i) { write(i, rest(slice, i)); });
    if (slice.single >= 0) y[slice.single] = narrow<T>(result(single));
  }
}

template <class T, class Access, int kHeld, bool kCluster, bool kRest>
__global__ void __launch_bounds__(row_threads(kRest), kRest ? 1 : 2) backward_kernel(BackwardArgs a, RowCut cut) {
  constexpr int kSize = Access::kSize;
  extern __shared__ uint4 memory[];
  __shared__ RowInbox<kCluster> inbox;
  RowTeam team(inbox);
  for (int64_t row = team.first_row(); row < a.rows; row += team.row_step()) {
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    const T* y = static_cast<const T*>(a.y) + row * a.y_stride;
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
    const RowSlice<T, Access> slice(dy, a.cols, cut.length, team.rank());
    const int begin = threadIdx.x, step = blockDim.x, kept = slice.count < kHeld * step ? static_cast<int>(slice.count) : kHeld * step;
    const RowRest<T, Access> rest_dy{dy, memory, int64_t{kHeld} * step, cut.shared};
    const RowRest<T, Access> rest_y{y, memory + cut.shared, rest_dy.held, cut.shared};
    const auto of_rest = [&](auto&& f) {
      if constexpr (kRest) rest_y.for_each(slice.count, f);
    };

    // 1. Load, and the sum of dy y.
    if constexpr (kRest) {
      rest_dy.ask(slice);
      rest_y.ask(slice);
      commit_copies();
    }
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
    if constexpr (kRest) wait_copies(0);
    of_rest([&](int64_t i) { add(rest_dy(slice, i), rest_y(slice, i)); });
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
    of_rest([&](int64_t i) { write(i, rest_dy(slice, i), rest_y(slice, i)); });
    if (slice.single >= 0) dx[slice.single] = narrow<T>(single_y * (single_dy - sum));
  }
}

#include <liger_kernel/core/cuda/row_map_kernels.inl>

}  // namespace
}  // namespace liger::softmax
