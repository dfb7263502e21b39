// The scalar end of a row, the same on both back ends: from the row's sums to its loss and the coefficients of its gradient.
// Include it inside an anonymous namespace: translation units of different ISAs must not share it.
#ifdef __CUDACC__
#define LIGER_ROW_FUNCTION __device__ __forceinline__
#else
#define LIGER_ROW_FUNCTION inline
#endif

constexpr float kLog2e = 1.44269504f;

struct RowSums {
  float largest = -INFINITY;  // of x over all columns but the target's
  float others = 0;           // sum of exp(x - largest) over them
  float weighted = 0;         // sum of w x over all columns, the target's included; used with smoothing
  float target;               // x of the target
};

// dx of a column other than the target is exp(x - top) * scale - w * shift.
struct RowResult {
  float loss, z;
  float top;    // largest x of the row; 0 when all are -inf
  float scale;
  float shift;
  float own;    // dx of the target
};

// exp(from - to), 1 for equal infinities.
LIGER_ROW_FUNCTION float ratio(float from, float to) { return from == to ? 1.f : expf(from - to); }

LIGER_ROW_FUNCTION RowResult finish(const ForwardArgs& a, const LabelStats& stats, int64_t row, int64_t target, const RowSums& r) {
  // 1. Sums relative to the largest of all. e is exactly 1 when the target is the largest; NaN for infinities and all -inf.
  const float top = fmaxf(r.largest, r.target);
  const float others = r.others * ratio(r.largest, top);
  const float e = expf(r.target - top);
  const float all = others + e;
  const float p = e / all, rest = others / all;  // p_y and 1 - p_y without cancellation
  const float log_all = logf(all);
  const float lse = top + log_all;

  // 2. Factors.
  const float s = a.label_smoothing, eps = s / static_cast<float>(a.vocab);
  const float w = a.class_weight ? a.class_weight[target] : 1.f;
  const float factor = (a.row_scale ? a.row_scale[row] : 1.f) * (a.token_scaling ? p : 1.f);
  const float scale_loss = (a.mean ? stats.inverse_weight : 1.f) * factor;
  const float scale_z = (a.mean ? stats.inverse_count : 1.f) * factor;

  // 3. Loss.
  const float nll = r.target >= top ? log1pf(others) : log_all + (top - r.target);
  float loss = (1 - s) * w * nll;
  if (s > 0) loss += eps * (lse * stats.weight_sum - r.weighted);
  const float z = a.lse_square_scale * lse * lse * scale_z;

  // 4. Gradient.
  const float dz = 2 * a.lse_square_scale * lse * scale_z;
  return {.loss = loss * scale_loss + z,
          .z = z,
          .top = top == -INFINITY ? 0.f : top,
          .scale = (scale_loss * ((1 - s) * w + eps * stats.weight_sum) + dz) / all,
          .shift = scale_loss * eps,
          .own = scale_loss * (eps * (p * stats.weight_sum - w) - (1 - s) * w * rest) + dz * p};
}
