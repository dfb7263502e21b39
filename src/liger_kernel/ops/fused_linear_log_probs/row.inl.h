// The scalar parts of a row, the same on both back ends: merging partial sums, the results, the factors of the gradient.
// Include it inside an anonymous namespace: translation units of different ISAs must not share it.
#ifdef __CUDACC__
#define LIGER_ROW_FUNCTION __device__ __forceinline__
#else
#define LIGER_ROW_FUNCTION inline
#endif

LIGER_ROW_FUNCTION bool valid_target(int64_t target, int64_t vocab) { return target >= 0 && target < vocab; }

// Below it e^d is 0 in fp32; products e^d d take it for -inf.
constexpr float kLowest = -87.3f;

// From a logit to z and its derivative. kPlain: z is the logit.
template <bool kPlain>
struct ToZ {
  LIGER_ROW_FUNCTION explicit ToZ(const Transform& t)
      : capped(t.softcap > 0),
        inner(capped ? t.logit_scale / t.softcap : t.logit_scale / t.temperature),
        outer(capped ? t.softcap / t.temperature : 1.f) {}
  template <class V>
  LIGER_ROW_FUNCTION V operator()(V logit) const {
    if constexpr (kPlain) return logit;
    return capped ? tanh(logit * inner) * outer : logit * inner;
  }
  template <class V>
  LIGER_ROW_FUNCTION V slope(V z) const {  // dz/dlogit = outer inner (1 - tanh^2)
    if constexpr (kPlain) return V{} + 1.f;
    const V t = z * (capped ? 1 / outer : 0.f);
    return (1.f - t * t) * (inner * outer);
  }
  bool capped;
  float inner, outer;
};

inline bool plain(const Transform& t) { return t.softcap <= 0 && t.logit_scale == t.temperature; }

// Monotonic in z; NaN above all; among equals the first column is the greatest.
LIGER_ROW_FUNCTION unsigned long long best_key(float z, uint32_t column) {
#ifdef __CUDACC__
  const uint32_t pattern = __float_as_uint(z);
#else
  const uint32_t pattern = float_to_bits(z);
#endif
  const uint32_t bits = z == 0 ? 0 : pattern;  // -0 and 0 are equal
  const uint32_t ordered = z != z ? ~0u : bits >> 31 ? ~bits : bits ^ 0x80000000u;
  return static_cast<unsigned long long>(ordered) << 32 | static_cast<uint32_t>(~column);
}
LIGER_ROW_FUNCTION int64_t column_of(unsigned long long key) { return static_cast<uint32_t>(~static_cast<uint32_t>(key)); }

// Sums relative to `largest` as in RowState; Sum is float within a tile on CUDA, double elsewhere.
template <class Sum>
struct Sums {
  float largest = -INFINITY;
  Sum others = -1, weighted = 0;
};

// exp(from - to) with 1 for equal infinities.
LIGER_ROW_FUNCTION float ratio(float from, float to) { return from == to ? 1.f : expf(from - to); }

// All elements of the lesser part, its largest included, become others of the greater one; each keeps its distance to the largest
// by the shift of the two.
template <class Sum, class Part>
LIGER_ROW_FUNCTION void merge(Sums<Sum>& a, Sums<Part> b) {
  const float top = a.largest >= b.largest ? a.largest : b.largest;
  const float wa = ratio(a.largest, top), wb = ratio(b.largest, top);
  const bool from_a = a.largest == top;
  const Sum count_a = a.others + 1, count_b = static_cast<Sum>(b.others) + 1;
  // A shift of -inf comes with a weight of 0.
  const Sum shift_a = wa > 0 ? (a.largest == top ? 0.f : a.largest - top) : 0.f;
  const Sum shift_b = wb > 0 ? (b.largest == top ? 0.f : b.largest - top) : 0.f;
  a.weighted = wa * (a.weighted + shift_a * count_a) + wb * (b.weighted + shift_b * count_b);
  a.others = from_a ? a.others + wb * count_b : static_cast<Sum>(b.others) + wa * count_a;
  a.largest = top;
}

// The results of a row whose columns are all in `state`.
LIGER_ROW_FUNCTION void write_results(const Results& r, int64_t row, const RowState& state) {
  const float others = static_cast<float>(state.others);
  // Infinite largest: NaN, as everything about such a row.
  const float log_sum = log1pf(others) + (state.largest - state.largest);
  r.logp[row] = (state.target - state.largest) - log_sum;
  r.largest[row] = state.largest;
  r.log_sum[row] = log_sum;
  if (r.entropy) r.entropy[row] = log_sum - static_cast<float>(state.weighted) / (1 + others);
  if (r.prediction) r.prediction[row] = column_of(state.best);
}
LIGER_ROW_FUNCTION void write_constants(const Results& r, int64_t row, float value) {
  r.logp[row] = r.largest[row] = r.log_sum[row] = value;
  if (r.entropy) r.entropy[row] = value;
  if (r.prediction) r.prediction[row] = -1;
}

// With d = z - largest, dz of a column other than the target is exp(d) (a + b d):
//   d logp = -p,  d lse = p,  d entropy = -p (log p + entropy),  p = exp(d - log_sum),  log p = d - log_sum
// The target adds d logp = 1 - p_y. The largest column has d = 0 exactly, and entropy - log_sum is minus the mean of d, so that
// neither cancels for a near-certain token.
struct RowFactors {
  LIGER_ROW_FUNCTION RowFactors(const GradientArgs& g, int64_t row) : largest(g.saved.largest[row]) {
    const float log_sum = g.saved.log_sum[row], logp = g.saved.logp[row], scale = expf(-log_sum);
    const float d_logp = g.upstream.logp ? g.upstream.logp[row] : 0.f;
    const float d_lse = g.upstream.lse ? g.upstream.lse[row] : 0.f;
    const float d_entropy = g.upstream.entropy ? g.upstream.entropy[row] : 0.f;
    const float entropy = g.upstream.entropy ? g.saved.entropy[row] : 0.f;
    a = scale * ((d_lse - d_logp) - d_entropy * (entropy - log_sum));
    b = -scale * d_entropy;
    own = d_logp * -expm1f(logp) + expf(logp) * (d_lse - d_entropy * (logp + entropy));
  }
  float largest, a, b;
  float own;  // dz of the target
};
