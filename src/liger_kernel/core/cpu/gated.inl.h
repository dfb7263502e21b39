// Elementwise gated units on the CPU, for [rows, cols] with row strides:
//
//   forward    c  = round(act(a)) * b * scale          round: to the operands' type, as eager code does
//   backward   da = dc * scale * b * act'(a)           db = dc * scale * act(a)
//
// One pass over each operand, everything else in registers; backward computes the activation again from a, so that forward
// keeps nothing. `Act` gives value(a) and value(a, slope); its file is included after this one, in each ISA's unit.
#pragma once
#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/core/host.h>

// What precedes the functions of an activation, which compile for the CPU and for CUDA.
#define LIGER_ACTIVATION inline

namespace liger {
namespace {

// The primitives of an activation. T is the operands' type.
//
// e^x: for fp32 operands exp() of simd.inl.h. For 16-bit ones half as long: 2^t, t = x log2 e, by a polynomial of degree 5 for
// the fraction (9e-8 relative, a fit of our own), added to the exponent in place. Its error of |x| 2^-24 is far below their
// rounding. t is clamped to where 2^t is exactly 0 and infinity; NaN passes through.
template <class T>
inline F exp_for(F x) {
  if constexpr (sizeof(T) == 4) {
    return exp(x);
  } else {
    const F t = min(set(128.f), max(set(-127.f), x * 1.44269504f)), magic = set(12582912.f);  // 1.5 * 2^23
    const F shifted = t + magic, f = t - (shifted - magic);
    const F p = ((((f * 0.00132647343f + 0.00967151485f) * f + 0.0555073358f) * f + 0.240222424f) * f + 0.693147004f) * f + 1.f;
    return (F)((I)p + (((I)shifted - (I)magic) << 23));
  }
}
inline F reciprocal(F x) { return 1.f / x; }
template <class T>
inline F reciprocal_for(F x) {
  return 1.f / x;
}
inline F quotient(F x, F y) { return x / y; }
template <class V>
inline V splat(float v) {
  return set(v);
}

// rounded<T>() of simd.inl.h; without AVX-512 GCC sends that through memory, an eighth of the time of the bf16 loop.
template <class T>
inline F nearest(F v) {
  return rounded<T>(v);
}
#if !defined(__AVX512F__)
template <>
inline F nearest<BFloat16>(F v) {
  const U u = (U)v, even = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  return select(v != v, (F)(u | 0x400000u), (F)even);
}
#endif

template <class T, class Act>
void gated_forward_span(const T* a, const T* b, T* c, int64_t n, const Act& act, float scale) {
  const auto product = [&](F x, F y) { return nearest<T>(act.value(x)) * y * scale; };
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) store(product(load(a + j), load(b + j)), c + j);
  if (j < n) store(product(load(a + j, n - j), load(b + j, n - j)), c + j, n - j);
}

// da may be a and db may be b; each may be nullptr: not wanted.
template <class T, class Act>
void gated_backward_span(const T* dc, const T* a, const T* b, T* da, T* db, int64_t n, const Act& act, float scale) {
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) {
    F slope;
    const F g = load(dc + j) * scale, y = load(b + j), value = act.value(load(a + j), slope);
    if (da) store(g * y * slope, da + j);
    if (db) store(g * (Act::kRoundInBackward ? nearest<T>(value) : value), db + j);
  }
  if (j < n) {
    F slope;
    const F g = load(dc + j, n - j) * scale, y = load(b + j, n - j), value = act.value(load(a + j, n - j), slope);
    if (da) store(g * y * slope, da + j, n - j);
    if (db) store(g * (Act::kRoundInBackward ? nearest<T>(value) : value), db + j, n - j);
  }
}

// body(row, first column, columns) over pieces of at most 4096 columns, so that one long row is split over the threads too.
template <class Body>
void for_each_piece(int64_t rows, int64_t cols, int64_t element_bytes, const Host& host, Body&& body) {
  constexpr int64_t kColumns = 4096;
  const int64_t pieces = (cols + kColumns - 1) / kColumns;
  host.parallel_for(rows * pieces, grain_for((pieces > 1 ? kColumns : cols) * element_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / pieces, first = (i - row * pieces) * kColumns;
      body(row, first, cols - first < kColumns ? cols - first : kColumns);
    }
  });
}

template <class T, class Act, class Args>
void gated_forward(const Args& x, const Act& act, float scale, const Host& host) {
  for_each_piece(x.rows, x.cols, 3 * sizeof(T), host, [&](int64_t row, int64_t first, int64_t n) {
    gated_forward_span(static_cast<const T*>(x.a) + row * x.a_stride + first, static_cast<const T*>(x.b) + row * x.b_stride + first,
                       static_cast<T*>(x.c) + row * x.c_stride + first, n, act, scale);
  });
}

template <class T, class Act, class Args>
void gated_backward(const Args& x, const Act& act, float scale, const Host& host) {
  for_each_piece(x.rows, x.cols, 5 * sizeof(T), host, [&](int64_t row, int64_t first, int64_t n) {
    gated_backward_span(static_cast<const T*>(x.dc) + row * x.dc_stride + first, static_cast<const T*>(x.a) + row * x.a_stride + first,
                        static_cast<const T*>(x.b) + row * x.b_stride + first,
                        x.da ? static_cast<T*>(x.da) + row * x.da_stride + first : nullptr,
                        x.db ? static_cast<T*>(x.db) + row * x.db_stride + first : nullptr, n, act, scale);
  });
}

}  // namespace
}  // namespace liger
