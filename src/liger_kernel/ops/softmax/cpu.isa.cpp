// Softmax on the CPU, compiled once per ISA; threads take rows. Forward reads a row for its largest element, again for the sum of
// exponentials and once more to write; backward for the sum of dy y and to write. After the first time it comes from cache. Sums are
// fp32 over runs of columns and fp64 over those. fp32 rows keep their exponentials in y; narrower ones would round them, and make
// them twice.
#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/softmax/exp_nonpositive.inl.h>
#include <liger_kernel/ops/softmax/softmax.h>

namespace liger::softmax {
namespace {

constexpr int64_t kRun = 128 * kLanes;  // columns

// n <= kLanes values; a constant n == kLanes makes it a plain load.
template <class T>
F load_some(const T* p, int64_t n, float fill = 0) {
  return n == kLanes ? load(p) : load(p, n, fill);
}
template <class T>
void store_some(F v, T* p, int64_t n) {
  n == kLanes ? store(v, p) : store(v, p, n);
}
// body(j, n) for every vector of columns [begin, end).
template <class Body>
void for_each_vector(int64_t begin, int64_t end, Body&& body) {
  int64_t j = begin;
  for (; j + kLanes <= end; j += kLanes) body(j, kLanes);
  if (j < end) body(j, end - j);
}
// The sum of term(j, n), a vector, over all columns.
template <class Term>
float sum_columns(int64_t cols, Term&& term) {
  double total = 0;
  for (int64_t begin = 0; begin < cols; begin += kRun) {
    const int64_t end = begin + kRun < cols ? begin + kRun : cols;
    F even{}, odd{};
    int64_t j = begin;
    for (; j + 2 * kLanes <= end; j += 2 * kLanes) even += term(j, kLanes), odd += term(j + kLanes, kLanes);
    for_each_vector(j, end, [&](int64_t k, int64_t n) { even += term(k, n); });
    total += sum(even + odd);
  }
  return static_cast<float>(total);
}

template <class T>
void forward_row(const T* x, T* y, int64_t cols) {
  constexpr bool kKeep = sizeof(T) == 4;
  F largest = set(-kInf);  // of what is no NaN
  for_each_vector(0, cols, [&](int64_t j, int64_t n) { largest = max(load_some(x + j, n, -kInf), largest); });
  const float top = max_lane(largest), base = top == -kInf ? 0.f : top;
  const float total = sum_columns(cols, [&](int64_t j, int64_t n) {
    const F e = exp_nonpositive(load_some(x + j, n, -kInf) - base);
    if constexpr (kKeep) store_some(e, y + j, n);
    return e;
  });
  const float scale = 1 / total;
  for_each_vector(0, cols, [&](int64_t j, int64_t n) {
    const F e = kKeep ? load_some(y + j, n) : exp_nonpositive(load_some(x + j, n) - base);
    store_some(e * scale, y + j, n);
  });
}

template <class T>
void backward_row(const T* dy, const T* y, T* dx, int64_t cols) {
  const float total = sum_columns(cols, [&](int64_t j, int64_t n) { return load_some(dy + j, n) * load_some(y + j, n); });
  for_each_vector(0, cols, [&](int64_t j, int64_t n) { store_some(load_some(y + j, n) * (load_some(dy + j, n) - total), dx + j, n); });
}

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(a.rows, grain_for(4 * a.cols * sizeof(T)), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        forward_row(static_cast<const T*>(a.x) + row * a.x_stride, static_cast<T*>(a.y) + row * a.y_stride, a.cols);
      }
    });
  });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(a.rows, grain_for(4 * a.cols * sizeof(T)), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        backward_row(static_cast<const T*>(a.dy) + row * a.dy_stride, static_cast<const T*>(a.y) + row * a.y_stride,
                     static_cast<T*>(a.dx) + row * a.dx_stride, a.cols);
      }
    });
  });
}

}  // namespace liger::softmax
