// e^x for x <= 0 in half the instructions of exp(). Included after core/cpu/simd.inl.h, by files compiled once per ISA.
#pragma once

namespace liger {
namespace {

// <= 2 ULP, 0 below -87.3, NaN for NaN.
[[maybe_unused]] inline F exp_nonpositive(F x) {
  const F lowest = set(-87.3f), clamped = max(lowest, x);  // keeps a NaN
  const F magic = set(12582912.f + 127.f);                 // 1.5 * 2^23 rounds to an integer in the low bits; with the exponent's bias
  const F t = clamped * 1.44269504f + magic, n = t - magic;
  const F r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
  const F p =
      (((((r * 1.98527617e-4f + 1.39304355e-3f) * r + 8.33336077e-3f) * r + 4.16664853e-2f) * r + 0.166666672f) * r + 0.5f) * r + 1.f;
  const F y = (p * r + 1.f) * (F)((I)t << 23);
  return (F)((I)y & ~(x < lowest));
}

}  // namespace
}  // namespace liger
