// GELU for CPU vectors and CUDA floats; include after core/cpu/gated.inl.h or core/cuda/gated.cuh.
#pragma once

namespace liger::geglu {
namespace {

// (1 + tanh(u)) / 2 = sigmoid(2 u): gelu(a) = a s, s = 1 / (1 + e), e = exp(-a (k1 + k3 a^2)). In the left tail nothing cancels;
// nor does 1 - s = e s where s is near 1.
template <class T>
struct GeluTanh {
  static constexpr bool kRoundInBackward = true;
  static constexpr float k1 = 1.5957691216057308f;   // 2 sqrt(2 / pi)
  static constexpr float k3 = 0.07135481627260025f;  // 0.044715 k1

  template <class V>
  LIGER_ACTIVATION V value(V a) const {
    return quotient(a, 1.f + exp_for<T>(a * (a * a * -k3 - k1)));
  }
  template <class V>
  LIGER_ACTIVATION V value(V a, V& slope) const {
    const V square = min(a * a, splat<V>(1e30f));  // finite: beyond, zero times infinity
    const V e = exp_for<T>(a * (square * -k3 - k1)), s = reciprocal(1.f + e), y = a * s;
    slope = s + y * select(a < 0.f, 1.f - s, e * s) * (square * (3 * k3) + k1);
    return y;
  }
};

// Phi(-x) = exp(-x^2 / 2) t P(t) for x >= 0, t = 1 / (1 + 0.24 x). P is a least-maximum fit of our own to 3.1e-9 relative over
// [0, 14], where exp underflows: the tail keeps its relative accuracy, and the slope shares the exponential.
template <class T>
struct GeluErf {
  static constexpr bool kRoundInBackward = true;

  template <class V>
  static LIGER_ACTIVATION V normal_cdf(V a, V bell) {  // bell = exp(-a^2 / 2)
    const V t = reciprocal_for<T>(abs(a) * 0.24f + 1.f);
    V p = t * 0.0254730936f - 0.124333233f;
    p = p * t + 0.204720646f;
    p = p * t - 0.143189281f;
    p = p * t + 0.140484706f;
    p = p * t + 0.0287158936f;
    p = p * t + 0.0875512436f;
    p = p * t + 0.0889837295f;
    p = p * t + 0.0958507657f;
    p = p * t + 0.0957424417f;
    const V tail = bell * p * t, cdf = select(a < 0.f, tail, 1.f - tail);
    if constexpr (sizeof(T) < 4) {
      return cdf;
    } else {
      // Around 0 the power series of Phi(a) - 1/2: the nine steps above leave six units in the last place, these three.
      const V square = a * a;
      V q = square * -4.12266741e-08f + 6.65969352e-07f;
      q = q * square - 9.44465626e-06f;
      q = q * square + 0.000115434688f;
      q = q * square - 0.00118732822f;
      q = q * square + 0.00997355701f;
      q = q * square - 0.0664903801f;
      q = q * square + 0.39894228f;
      return select(abs(a) < 1.f, a * q + 0.5f, cdf);
    }
  }
  template <class V>
  LIGER_ACTIVATION V value(V a) const {
    return a * normal_cdf(a, exp_for<T>(a * a * -0.5f));
  }
  template <class V>
  LIGER_ACTIVATION V value(V a, V& slope) const {
    const V bell = exp_for<T>(a * a * -0.5f), cdf = normal_cdf(a, bell);
    slope = cdf + a * bell * 0.3989422804f;  // 1 / sqrt(2 pi)
    return a * cdf;
  }
};

}  // namespace
}  // namespace liger::geglu
