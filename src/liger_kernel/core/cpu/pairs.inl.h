// Losses of pairs of elements (input, target) on the CPU; the CPU side of pairs.cuh, with the same contract, on vectors. Included after
// core/cpu/simd.inl.h, by files compiled once per ISA. Pieces of a row are summed in fp32 and added in their order in fp64, whatever the
// number of threads.
#pragma once
#include <liger_kernel/core/pairs.h>

namespace liger {
namespace {

template <class T>
F pair_load(const T* p, int64_t n) {
  return n == kLanes ? load(p) : load(p, n);
}
template <class T>
void pair_store(F v, T* p, int64_t n) {
  n == kLanes ? store(v, p) : store(v, p, n);
}

// body(j, n) for every vector of n columns.
template <class Body>
void for_each_pair(int64_t cols, Body&& body) {
  int64_t j = 0;
  for (; j + kLanes <= cols; j += kLanes) body(j, int64_t{kLanes});
  if (j < cols) body(j, cols - j);
}

// body(item, row, first, n) for every piece of every row, over threads.
template <class Body>
void for_each_pair_piece(int64_t rows, int64_t cols, int64_t bytes, const Host& host, Body&& body) {
  const int64_t chunks = (cols + kPairPiece - 1) / kPairPiece, columns = cols < kPairPiece ? cols : kPairPiece;
  host.parallel_for(rows * chunks, grain_for(columns * bytes), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      const int64_t row = item / chunks, first = (item - row * chunks) * kPairPiece;
      body(item, row, first, cols - first < kPairPiece ? cols - first : kPairPiece);
    }
  });
}

template <class X, class T, class Args, class Element>
void pairs_forward(const Args& a, const Element& element, const Host& host) {
  const int64_t items = a.rows * ((a.cols + kPairPiece - 1) / kPairPiece);
  const Scratch sums = a.total ? host.scratch((items + 1) * sizeof(float)) : Scratch{};
  const float factor = element.factor();
  for_each_pair_piece(a.rows, a.cols, 3 * sizeof(X), host, [&](int64_t item, int64_t row, int64_t first, int64_t columns) {
    const X* x = static_cast<const X*>(a.input) + row * a.input_stride + first;
    const T* t = static_cast<const T*>(a.target) + row * a.target_stride + first;
    float* loss = a.loss ? a.loss + row * a.loss_stride + first : nullptr;
    X* grad = a.grad ? static_cast<X*>(a.grad) + row * a.grad_stride + first : nullptr;
    const bool skip = element.skips(row);
    F total{};
    for_each_pair(columns, [&](int64_t j, int64_t n) {
      F value{}, slope{};
      if (!skip) element(pair_load(x + j, n), pair_load(t + j, n), value, slope);
      if (loss) pair_store(value, loss + j, n);
      if (grad) pair_store(slope * factor, grad + j, n);
      if (n < kLanes) {
        for (int64_t i = n; i < kLanes; i++) value[i] = 0;
      }
      total += value;
    });
    if (a.total) sums.as<float>()[item] = sum(total);
  });
  if (!a.total) return;
  double all = 0;
  for (int64_t item = 0; item < items; item++) all += sums.as<float>()[item];
  *a.total = static_cast<float>(all * factor);
}

template <class X, class T, class Args, class Element>
void pairs_backward(const Args& a, const Element& element, const Host& host) {
  const float factor = a.of_total ? element.factor() * *a.dy : element.factor();
  for_each_pair_piece(a.rows, a.cols, 4 + 2 * sizeof(X), host, [&](int64_t, int64_t row, int64_t first, int64_t columns) {
    const float* dy = a.of_total ? nullptr : a.dy + row * a.dy_stride + first;
    X* grad = static_cast<X*>(a.grad) + row * a.grad_stride + first;
    const bool skip = element.skips(row);
    for_each_pair(columns, [&](int64_t j, int64_t n) {
      F slope{};
      if (!skip) slope = element.template slope<X, T>(a, row, first + j, n) * (dy ? pair_load(dy + j, n) * factor : set(factor));
      pair_store(slope, grad + j, n);
    });
  });
}

// run(Type<X>, Type<T>) of the types of input (or its gradient) and target.
template <class Run>
void visit_pair(DType dtype, DType target_dtype, Run&& run) {
  visit(dtype, [&]<class X>(Type<X> x) { visit(target_dtype, [&]<class T>(Type<T> t) { run(x, t); }); });
}

}  // namespace
}  // namespace liger
