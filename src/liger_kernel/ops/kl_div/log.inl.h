// The natural logarithm of fp32 vectors. Included after core/cpu/simd.inl.h, by files compiled once per ISA.
#pragma once

namespace liger {
namespace {

// <= 2 ULP; -inf for 0, NaN below, infinity and NaN as they are. x = 2^e m with m in [sqrt(1/2), sqrt(2)), ln 2 in two parts, and the
// polynomial of the Cephes library (Moshier 1989) for log(1 + f).
[[maybe_unused]] inline F log(F x) {
  const I tiny = x < set(1.17549435e-38f);  // subnormal numbers, brought into the normal range
  const F scaled = select(tiny, x * 8388608.f, x);
  const I shifted = (I)scaled - 0x3f3504f3;  // bits of sqrt(1/2)
  const I e = (shifted >> 23) - (tiny & 23);
  const F f = (F)((shifted & 0x7fffff) + 0x3f3504f3) - 1.f;
  const F n = __builtin_convertvector(e, F), s = f * f;
  F p = f * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  F y = n * 0.693359375f + (f + (p * f * s - n * 2.12194440e-4f - s * 0.5f));
  y = select(x == F{}, set(-kInf), y);
  y = select(x == kInf, x, y);
  return select(x >= F{}, y, set(std::numeric_limits<float>::quiet_NaN()));
}

}  // namespace
}  // namespace liger
