// Total variation distance on the CPU, compiled once per ISA: one pass, in pieces of rows.
#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/core/cpu/pairs.inl.h>
#include <liger_kernel/ops/tvd/tvd.h>

namespace liger::tvd {
namespace {

struct Element {
  const int64_t* labels;
  int64_t labels_stride, ignore_index;
  const float* scale;
  float host_factor;

  bool skips(int64_t row) const { return labels && labels[row * labels_stride] == ignore_index; }
  float factor() const { return scale ? host_factor * *scale : host_factor; }
  static F half_sign(F d) { return select(d > 0.f, set(0.5f), select(d < 0.f, set(-0.5f), F{})); }
  void operator()(F x, F t, F& loss, F& slope) const {
    loss = abs(x - t) * 0.5f;
    slope = half_sign(x - t);
  }
  template <class X, class T>
  F slope(const BackwardArgs& a, int64_t row, int64_t j, int64_t n) const {
    return half_sign(pair_load(static_cast<const X*>(a.input) + row * a.input_stride + j, n) -
                     pair_load(static_cast<const T*>(a.target) + row * a.target_stride + j, n));
  }
};

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  const Element element{a.labels, a.labels_stride, a.ignore_index, a.scale, a.factor};
  visit_pair(a.dtype, a.target_dtype, [&]<class X, class T>(Type<X>, Type<T>) { pairs_forward<X, T>(a, element, host); });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  const Element element{a.labels, a.labels_stride, a.ignore_index, a.scale, a.factor};
  visit_pair(a.dtype, a.target_dtype, [&]<class X, class T>(Type<X>, Type<T>) { pairs_backward<X, T>(a, element, host); });
}

}  // namespace liger::tvd
