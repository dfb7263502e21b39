// The kernels of sparsemax: a row is read once, kept as 16-byte vectors in registers (what does not fit is read again), and looked at
// there until the threshold is found: one exchange for the largest element, one for each pass of the search, in each of which a thread
// without candidates has nothing to do.
#pragma once
#include <liger_kernel/core/cuda/row_map.cuh>
#include <liger_kernel/ops/sparsemax/sparsemax.h>

namespace liger::sparsemax {
namespace {

#define LIGER_ROW_FUNCTION __device__ __forceinline__
#include <liger_kernel/ops/sparsemax/threshold.inl.h>

template <class T, class Access, int kHeld, bool kCluster, bool kRest>
__global__ void __launch_bounds__(row_threads(kRest), kRest ? 1 : 2) forward_kernel(ForwardArgs a, RowCut cut) {
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

    // 1. Load.
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
    if constexpr (kRest) wait_copies(0);
    // f(element) of all elements of this thread.
    const auto for_each = [&](auto&& f) {
      const auto visit_vector = [&](const Access& values) {
        float v[kSize];
        values.to_float(v);
#pragma unroll
        for (int k = 0; k < kSize; ++k) f(v[k]);
      };
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (begin + i * step < kept) visit_vector(held[i]);
      }
      of_rest([&](int64_t i) { visit_vector(rest(slice, i)); });
      f(single);
    };

    // 2. The largest element; NaN counts as +inf, which makes the row NaN.
    float mine = -INFINITY;
    for_each([&](float v) { mine = fmaxf(mine, v == v ? v : INFINITY); });
    const float largest = team.reduce({mine, 0.f}, LargestOf()).x;

    // 3. The threshold.
    float tau = NAN;
    if (fabsf(largest) < INFINITY) {
      Threshold search;
      float2 sums;
      do {
        sums = AddPairs::identity();
        if (mine - largest > search.t) {
          for_each([&](float v) {
            const float z = v - largest;
            if (z > search.t) sums = {sums.x + z, sums.y + 1.f};
          });
        }
        sums = team.reduce(sums, AddPairs());
      } while (search.next(sums.x, sums.y));
      tau = search.lower;
    }

    // 4. Write. A comparison with NaN is false, so that NaN takes the difference.
    const auto value = [&](float v) {
      const float d = (v - largest) - tau;
      return d <= 0.f ? 0.f : d;
    };
    const auto write = [&](int64_t i, const Access& values) {
      float v[kSize];
      values.to_float(v);
#pragma unroll
      for (int k = 0; k < kSize; ++k) v[k] = value(v[k]);
      Access::from_float(v).store(y + slice.at(i));
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) write(begin + i * step, held[i]);
    }
    of_rest([&](int64_t i) { write(i, rest(slice, i)); });
    if (slice.single >= 0) y[slice.single] = narrow<T>(value(single));
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

    // 1. Load, and the sum of dy over the support and its size.
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
    float2 sums = AddPairs::identity();
    const auto take = [&](float g, float p) {
      if (p != 0.f) sums = {sums.x + g, sums.y + 1.f};
    };
    const auto add = [&](const Access& g, const Access& p) {
      float u[kSize], v[kSize];
      g.to_float(u), p.to_float(v);
#pragma unroll
      for (int k = 0; k < kSize; ++k) take(u[k], v[k]);
    };
    take(single_dy, single_y);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) add(held_dy[i], held_y[i]);
    }
    if constexpr (kRest) wait_copies(0);
    of_rest([&](int64_t i) { add(rest_dy(slice, i), rest_y(slice, i)); });
    sums = team.reduce(sums, AddPairs());
    const float mean = sums.x / sums.y;

    // 2. Write; NaN goes on.
    const auto gradient = [&](float g, float p) { return p != p ? p : p != 0.f ? g - mean : 0.f; };
    const auto write = [&](int64_t i, const Access& g, const Access& p) {
      float u[kSize], v[kSize];
      g.to_float(u), p.to_float(v);
#pragma unroll
      for (int k = 0; k < kSize; ++k) v[k] = gradient(u[k], v[k]);
      Access::from_float(v).store(dx + slice.at(i));
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (begin + i * step < kept) write(begin + i * step, held_dy[i], held_y[i]);
    }
    of_rest([&](int64_t i) { write(i, rest_dy(slice, i), rest_y(slice, i)); });
    if (slice.single >= 0) dx[slice.single] = narrow<T>(gradient(single_dy, single_y));
  }
}

#include <liger_kernel/core/cuda/row_map_kernels.inl>

}  // namespace
}  // namespace liger::sparsemax
