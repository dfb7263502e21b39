// Sparsemax on the CPU, compiled once per ISA; threads take rows. Forward reads a row for its largest element, then once for each pass
// of the search for the threshold, from cache, and once more to write. Sums are fp32 over runs of columns and fp64 over those.
#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/sparsemax/sparsemax.h>

namespace liger::sparsemax {
namespace {

#define LIGER_ROW_FUNCTION
#include <liger_kernel/ops/sparsemax/threshold.inl.h>

constexpr int64_t kRun = 128 * kLanes;  // columns

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

struct Sums {
  float sum, count;
};
// The sum of value(j, n) over the lanes of where(j, n), and their number. `term` gives both.
template <class Term>
Sums sum_chosen(int64_t cols, Term&& term) {
  double sum_all = 0;
  int64_t count_all = 0;
  for (int64_t begin = 0; begin < cols; begin += kRun) {
    F values{};
    I counts{};
    for_each_vector(begin, begin + kRun < cols ? begin + kRun : cols, [&](int64_t j, int64_t n) {
      const auto [value, chosen] = term(j, n);
      values += select(chosen, value, F{});
      counts -= chosen;
    });
    sum_all += sum(values);
    for (int i = 0; i < kLanes; i++) count_all += counts[i];
  }
  return {static_cast<float>(sum_all), static_cast<float>(count_all)};
}
struct Chosen {
  F value;
  I mask;
};

template <class T>
void forward_row(const T* x, T* y, int64_t cols) {
  F most = set(-kInf);
  I bad{};  // NaN or +inf
  for_each_vector(0, cols, [&](int64_t j, int64_t n) {
    const F v = load_some(x + j, n, -kInf);
    bad |= ~(v < kInf);
    most = max(v, most);
  });
  const float largest = max_lane(most);
  float tau = std::numeric_limits<float>::quiet_NaN();
  if (!any(bad) && largest > -kInf) {
    Threshold search;
    Sums sums;
    do {
      sums = sum_chosen(cols, [&](int64_t j, int64_t n) {
        const F z = load_some(x + j, n, -kInf) - largest;
        return Chosen{z, z > search.t};
      });
    } while (search.next(sums.sum, sums.count));
    tau = search.lower;
  }
  for_each_vector(0, cols, [&](int64_t j, int64_t n) {  // a comparison with NaN is false, so that NaN takes the difference
    const F d = (load_some(x + j, n) - largest) - tau;
    store_some(select(d <= 0.f, F{}, d), y + j, n);
  });
}

template <class T>
void backward_row(const T* dy, const T* y, T* dx, int64_t cols) {
  const Sums sums = sum_chosen(cols, [&](int64_t j, int64_t n) { return Chosen{load_some(dy + j, n), load_some(y + j, n) != 0.f}; });
  const float mean = sums.sum / sums.count;
  for_each_vector(0, cols, [&](int64_t j, int64_t n) {  // NaN goes on
    const F p = load_some(y + j, n), d = load_some(dy + j, n) - mean;
    store_some(select(p != p, p, select(p != 0.f, d, F{})), dx + j, n);
  });
}

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(a.rows, grain_for(8 * a.cols * sizeof(T)), [&](int64_t begin, int64_t end) {
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

}  // namespace liger::sparsemax
