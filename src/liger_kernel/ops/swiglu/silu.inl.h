// SiLU for CPU vectors and CUDA floats; include after core/cpu/gated.inl.h or core/cuda/gated.cuh.
#pragma once

namespace liger::swiglu {
namespace {

// With e = exp(-x): sigmoid(x) = s = 1 / (1 + e), and 1 - s = e s, which does not cancel where s is near 1.
template <class T>
struct Silu {
  static constexpr bool kRoundInBackward = false;
  float gate;

  template <class V>
  LIGER_ACTIVATION V value(V a) const {
    const V x = a * gate;
    return quotient(x, 1.f + exp_for<T>(-x));
  }
  // slope = d silu(gate a) / d a
  template <class V>
  LIGER_ACTIVATION V value(V a, V& slope) const {
    const V x = a * gate, e = exp_for<T>(-x), s = reciprocal(1.f + e), y = x * s;
    slope = (s + y * select(x < 0.f, 1.f - s, e * s)) * gate;
    return y;
  }
};

}  // namespace
}  // namespace liger::swiglu
