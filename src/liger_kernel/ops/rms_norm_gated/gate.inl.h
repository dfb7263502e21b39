// a = act(gate) and its slope, for CPU vectors and CUDA floats; include after core/cpu/gated.inl.h or core/cuda/gated.cuh.
#pragma once
#include <limits>

#include <liger_kernel/ops/rms_norm_gated/rms_norm_gated.h>

namespace liger::rms_norm_gated {
namespace {

// Without a gate this stands for its elements: its sigmoid is 1, with slope 0.
constexpr float kOpen = std::numeric_limits<float>::infinity();

// With e = exp(-z): s = sigmoid(z) = 1 / (1 + e), and 1 - s = e s, which does not cancel where s is near 1. Both activations are s times
// something, so that no element branches: a branch would keep the exponentials of neighbours from overlapping.
template <class T>
struct Gate {
  bool silu;

  template <class Args>
  LIGER_ACTIVATION static Gate of(const Args& a) {
    return {a.gate && a.activation == Activation::kSilu};
  }
  template <class V>
  LIGER_ACTIVATION V value(V z) const {
    const V s = reciprocal_for<T>(1.f + exp_for<T>(-z));
    return (silu ? z : splat<V>(1.f)) * s;
  }
  // slope = act'(z): s + z s (1 - s), or s (1 - s)
  template <class V>
  LIGER_ACTIVATION V value(V z, V& slope) const {
    const V e = exp_for<T>(-z), s = reciprocal_for<T>(1.f + e), a = (silu ? z : splat<V>(1.f)) * s;
    slope = (silu ? s : splat<V>(0.f)) + a * select(z < 0.f, 1.f - s, e * s);
    return a;
  }
};

}  // namespace
}  // namespace liger::rms_norm_gated
