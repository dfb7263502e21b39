// KL divergence on the CPU, compiled once per ISA: one pass, in pieces of rows.
#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/kl_div/kl_div.h>
#include <liger_kernel/ops/kl_div/log.inl.h>
#include <liger_kernel/core/cpu/pairs.inl.h>

namespace liger::kl_div {
namespace {

template <bool kLogTarget>
struct Element {
  float eps = 0, scale = 1;

  bool skips(int64_t) const { return false; }
  float factor() const { return scale; }
  static F probability(F t) { return kLogTarget ? exp(t) : t; }
  void operator()(F x, F t, F& loss, F& slope) const {
    const F p = probability(t), own = kLogTarget ? t : log(max(t, set(eps)));
    loss = select((p == 0.f) & (x == x), F{}, p * (own - x));  // also against -inf
    slope = -p;
  }
  template <class X, class T, class Args>
  F slope(const Args& a, int64_t row, int64_t j, int64_t n) const {
    return -probability(pair_load(static_cast<const T*>(a.target) + row * a.target_stride + j, n));
  }
};

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  visit_pair(a.dtype, a.target_dtype, [&]<class X, class T>(Type<X>, Type<T>) {
    if (a.log_target) {
      pairs_forward<X, T>(a, Element<true>{.eps = a.eps, .scale = a.factor}, host);
    } else {
      pairs_forward<X, T>(a, Element<false>{.eps = a.eps, .scale = a.factor}, host);
    }
  });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  visit_pair(a.dtype, a.target_dtype, [&]<class X, class T>(Type<X>, Type<T>) {
    if (a.log_target) {
      pairs_backward<X, T>(a, Element<true>{.scale = a.factor}, host);
    } else {
      pairs_backward<X, T>(a, Element<false>{.scale = a.factor}, host);
    }
  });
}

}  // namespace liger::kl_div
