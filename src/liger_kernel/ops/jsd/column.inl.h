// One column of the divergence, the same on both back ends and for jsd and fused_linear_jsd: V is a vector of the CPU or one float.
// Include it inside an anonymous namespace (translation units of different ISAs must not share it), after core/cpu/simd.inl.h or
// core/cuda/packed.cuh.
#ifdef __CUDACC__
#define LIGER_COLUMN_FUNCTION __device__ __forceinline__
#else
#define LIGER_COLUMN_FUNCTION inline
#endif

enum class Kind { kForward, kReverse, kMixture };  // beta = 0: KL(P || Q); beta = 1: KL(Q || P); between

inline Kind kind_of(float beta) { return beta == 0 ? Kind::kForward : beta == 1 ? Kind::kReverse : Kind::kMixture; }

// visit_kind(kind, [&]<Kind kKind>() { ... })
template <class F>
inline void visit_kind(Kind kind, F&& f) {
  if (kind == Kind::kForward) return f.template operator()<Kind::kForward>();
  if (kind == Kind::kReverse) return f.template operator()<Kind::kReverse>();
  f.template operator()<Kind::kMixture>();
}

#ifdef __CUDACC__
LIGER_COLUMN_FUNCTION float choose_if(bool condition, float a, float b) { return condition ? a : b; }
LIGER_COLUMN_FUNCTION float larger(float a, float b) { return fmaxf(a, b); }
LIGER_COLUMN_FUNCTION float magnitude(float v) { return fabsf(v); }
// kFast: for 16-bit inputs, whose own rounding is far above the error of e^v, 2^-22 + |v| 2^-24.
template <bool kFast>
LIGER_COLUMN_FUNCTION float exp_of(float v) {
  return kFast ? __expf(v) : expf(v);
}
template <bool kFast>
LIGER_COLUMN_FUNCTION float log1p_of(float t) {
  return log1pf(t);
}
#else
LIGER_COLUMN_FUNCTION F choose_if(I condition, F a, F b) { return select(condition, a, b); }
LIGER_COLUMN_FUNCTION F larger(F a, F b) { return max(a, b); }
LIGER_COLUMN_FUNCTION F magnitude(F v) { return abs(v); }
template <bool kFast>
LIGER_COLUMN_FUNCTION F exp_of(F v) {
  return exp(v);
}
// log v of a normal v > 0, <= 2 ULP; infinity and NaN stay. v = 2^k m with m in [sqrt(1/2), sqrt(2)), then a polynomial in m - 1.
LIGER_COLUMN_FUNCTION F log(F v) {
  const I bits = (I)v, k = (bits - 0x3f3504f3) >> 23;
  const F f = (F)(bits - (k << 23)) - 1.f, n = __builtin_convertvector(k, F), square = f * f;
  const F p = (((((((f * 7.0376836292e-2f - 1.1514610310e-1f) * f + 1.1676998740e-1f) * f - 1.2420140846e-1f) * f + 1.4249322787e-1f) * f -
                 1.6668057665e-1f) *
                    f +
                2.0000714765e-1f) *
                   f -
               2.4999993993e-1f) *
                  f +
              3.3333331174e-1f;
  const F r = f * square * p + n * -2.12194440e-4f - square * 0.5f + f + n * 0.693359375f;
  return select(v < set(kInf), r, v);
}
// log(1 + t) for t in (-1, 0]; what 1 + t loses of t is added to first order.
template <bool kFast>
LIGER_COLUMN_FUNCTION F log1p_of(F t) {
  const F v = t + 1.f;
  return log(v) + (t - (v - 1.f));
}
#endif

// a b, where a probability a of 0 outweighs an infinite b.
template <class V>
LIGER_COLUMN_FUNCTION V times(V a, V b) {
  return choose_if(a == 0.f, V{}, a * b);
}

// With S = sum over the columns of `slope`:
//   free x:             dx = slope - p (kForward), slope + q (kReverse), slope (kMixture)
//   x of a softmax:     dx = q - p     (kForward), slope - q S (else)
template <class V>
struct Column {
  V loss, slope, q, p;
};

#ifdef __CUDACC__
// The mixture for 16-bit inputs, by base-2 logarithms and without a case for infinities: 1.65 ms where the general form took 2.02, 8192 x
// 128256 in bf16 on an H200. Log-probabilities below kLowestLog, whose exponentials are 0, are raised to it, so that no product is 0 times
// infinity.
constexpr float kLowestLog = -1e4f;
LIGER_COLUMN_FUNCTION float bounded(float v) { return larger_or_nan(v, kLowestLog); }
// A share of at most 1 - 2^-24, so that the other's logarithm is finite.
LIGER_COLUMN_FUNCTION float share_of(float beta) { return fminf(beta, 0x1.fffffep-1f); }

// log2 M less that of the larger one; d2 = log2(p / q).
LIGER_COLUMN_FUNCTION float mixture_log2(float d2, float e, float beta) {
  return log2_fast(fmaf(e - 1.f, d2 > 0.f ? share_of(1 - beta) : share_of(beta), 1.f));
}
LIGER_COLUMN_FUNCTION Column<float> mixture(float d2, float top2, float beta) {
  const float top = exp2_fast(top2), e = exp2_fast(-fabsf(d2)), less = top * e, l = mixture_log2(d2, e, beta);
  Column<float> c;
  c.p = d2 > 0.f ? top : less;
  c.q = d2 > 0.f ? less : top;
  c.slope = c.q * (-fmaxf(d2, 0.f) - l) * ((1 - beta) * kLog2ToLog);
  c.loss = larger_or_nan(fmaf(c.p * (fminf(d2, 0.f) - l), beta * kLog2ToLog, c.slope), 0.f);
  return c;
}
#endif

// The distance d = y - x carries everything: with e = exp(-|d|), log M = max(x, y) + log1p((1 - share) (e - 1)), share being the weight
// of the larger one. So log M neither underflows nor loses x - log M to the size of x.
template <Kind kKind, bool kFast, class V>
LIGER_COLUMN_FUNCTION Column<V> column(V x, V y, float beta) {
#ifdef __CUDACC__
  if constexpr (kFast && kKind == Kind::kMixture) {
    x = bounded(x), y = bounded(y);
    return mixture((y - x) * kExpToExp2, larger(x, y) * kExpToExp2, beta);
  }
#endif
  const V d = choose_if(x == y, V{}, y - x);  // equal infinities included
  Column<V> c{};
  if constexpr (kKind == Kind::kForward) {
    c.q = exp_of<kFast>(x), c.p = exp_of<kFast>(y);
    c.loss = times(c.p, d);
  } else if constexpr (kKind == Kind::kReverse) {
    c.q = exp_of<kFast>(x);
    c.loss = c.slope = times(c.q, -d);
  } else {
    const auto teacher = d > 0.f;  // has the larger probability
    const V top = exp_of<kFast>(larger(x, y)), e = exp_of<kFast>(-magnitude(d)), less = top * e;
    const V l = log1p_of<kFast>((e - 1.f) * choose_if(teacher, V{} + (1 - beta), V{} + beta));  // log M - max(x, y)
    c.p = choose_if(teacher, top, less);
    c.q = choose_if(teacher, less, top);
    const V a = choose_if(teacher, -l, d - l), b = choose_if(teacher, -d - l, -l);  // y - log M, x - log M
    c.slope = times(c.q, b) * (1 - beta);
    // Never negative, by convexity; a NaN stays.
    const V loss = times(c.p, a) * beta + c.slope;
    c.loss = choose_if(loss < 0.f, V{}, loss);
  }
  return c;
}
