// The scalar end of a row, the same on both back ends: from the row's sums to its loss and the coefficients of its gradient.
// Include it inside an anonymous namespace: translation units of different ISAs must not share it.
#ifdef __CUDACC__
#define LIGER_ROW_FUNCTION __device__ __forceinline__
#else
#define LIGER_ROW_FUNCTION inline
#endif

constexpr float kLog2e = 1.44269504f;

struct RowSums {
  float largest = -INFINITY;  // of x over all columns but the target's, or over all
  float others = 0;           // sum of exp(x - largest) over all columns but the target's
  float weighted = 0;         // sum of w x over all columns, the target's included; used with smoothing
  float target;               // x of the target
};

// kFast: e^x and quotients to about 2^-20 in a few instructions, for 16-bit logits. The whole row waits for them.
template <bool kFast>
LIGER_ROW_FUNCTION float row_exp(float x) {
#ifdef __CUDACC__
  if constexpr (kFast) return __expf(x);
#endif
  return expf(x);
}
// exp(from - to), 1 for equal infinities.
template <bool kFast = false>
LIGER_ROW_FUNCTION float ratio(float from, float to) {
  return from == to ? 1.f : row_exp<kFast>(from - to);
}
template <bool kFast>
LIGER_ROW_FUNCTION float row_quotient(float x, float y) {
#ifdef __CUDACC__
  if constexpr (kFast) return __fdividef(x, y);
#endif
  return x / y;
}

// dx of a column other than the target is exp(x - top) * scale - w * shift.
struct RowGradient {
  float top;  // largest x of the row; 0 when all are -inf
  float scale;
  float shift;
};

// Sums relative to the largest x of all and the factors of the row. The three results are apart, so that the threads that
// need only the coefficients do not pay for logarithms.
template <bool kFast = false>
struct Row {
  LIGER_ROW_FUNCTION Row(const ForwardArgs& a, const LabelStats& stats, int64_t row, int64_t target, const RowSums& sums)
      : a(a), stats(stats), sums(sums) {
    top = fmaxf(sums.largest, sums.target);
    others = sums.others * ratio<kFast>(sums.largest, top);
    e = row_exp<kFast>(sums.target - top);  // exactly 1 when the target is the largest; NaN for infinities and for all -inf
    all = others + e;
    w = a.class_weight ? a.class_weight[target] : 1.f;
    const float factor = (a.row_scale ? a.row_scale[row] : 1.f) * (a.token_scaling ? e / all : 1.f);
    scale_loss = (a.mean ? stats.inverse_weight : 1.f) * factor;
    scale_z = (a.mean ? stats.inverse_count : 1.f) * factor;
  }

  LIGER_ROW_FUNCTION float lse() const { return top + logf(all); }
  LIGER_ROW_FUNCTION float eps() const { return a.label_smoothing / static_cast<float>(a.vocab); }
  LIGER_ROW_FUNCTION float z_loss() const { return a.lse_square_scale * lse() * lse() * scale_z; }
  LIGER_ROW_FUNCTION float dz() const { return a.lse_square_scale != 0 ? 2 * a.lse_square_scale * lse() * scale_z : 0.f; }

  // z included.
  LIGER_ROW_FUNCTION float loss() const {
    const float nll = sums.target >= top ? log1pf(others * e) : logf(all) + (top - sums.target);  // e is 1 or NaN there
    float value = (1 - a.label_smoothing) * w * nll;
    if (a.label_smoothing > 0) value += eps() * (lse() * stats.weight_sum - sums.weighted);
    value *= scale_loss;
    return a.lse_square_scale != 0 ? value + z_loss() : value;
  }

  LIGER_ROW_FUNCTION RowGradient gradient() const {
    return {.top = top == -INFINITY ? 0.f : top,
            .scale = row_quotient<kFast>(scale_loss * ((1 - a.label_smoothing) * w + eps() * stats.weight_sum) + dz(), all),
            .shift = scale_loss * eps()};
  }

  // dx of the target: p_y - 1 is minus the others' share, without cancellation.
  LIGER_ROW_FUNCTION float own() const {
    const float p = row_quotient<kFast>(e, all), rest = row_quotient<kFast>(others, all);
    return scale_loss * (eps() * (p * stats.weight_sum - w) - (1 - a.label_smoothing) * w * rest) + dz() * p;
  }

  const ForwardArgs& a;
  const LabelStats& stats;
  const RowSums& sums;
  float top, others, e, all;
  float w, scale_loss, scale_z;
};
