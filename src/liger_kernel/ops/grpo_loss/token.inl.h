// One token's terms, the same on both back ends.
// Include it inside an anonymous namespace: translation units of different ISAs must not share it.
#ifdef __CUDACC__
#define LIGER_TOKEN_FUNCTION __device__ __forceinline__
#else
#define LIGER_TOKEN_FUNCTION inline
#endif

struct Term {
  float loss, clipped;
  float log_slope;    // d loss / d logp beside the ratio
  float ratio_slope;  // d loss / d log r
};

// Where the ratio is cut its slope is 0, also where the ratio itself has overflowed.
LIGER_TOKEN_FUNCTION float slope_of(float factor, float r) { return factor == 0 ? 0.f : factor * r; }

LIGER_TOKEN_FUNCTION Term policy_term(const Options& o, float logp, float r, float advantage, float phi) {
  Term t{0, 0, 0, 0};
  switch (o.kind) {
    case Kind::kClipped: {
      const float bounded = r > o.delta ? o.delta : r, clamped = r < o.low ? o.low : r > o.high ? o.high : r;
      const float a = bounded * advantage, b = clamped * advantage;
      const float slope_a = r > o.delta ? 0.f : 1.f, slope_b = r < o.low || r > o.high ? 0.f : 1.f;
      t.loss = a < b ? -a : -b;
      // Equal: the mean of both slopes, as torch.min has it.
      const float slope = a < b ? slope_a : a > b ? slope_b : 0.5f * (slope_a + slope_b);
      t.ratio_slope = slope_of(-advantage * slope, r);
      t.clipped = (r < o.low && advantage < 0) || (r > o.high && advantage > 0) ? 1.f : 0.f;
      break;
    }
    case Kind::kCispo: {
      t.log_slope = -(r > o.high ? o.high : r) * advantage;
      t.loss = t.log_slope * logp;
      t.clipped = r > o.high && advantage > 0 ? 1.f : 0.f;
      break;
    }
    case Kind::kSapo: {
      const float tau = advantage > 0 ? o.tau_positive : o.tau_negative, x = tau * (r - 1), e = expf(-fabsf(x));
      const float small = e / (1 + e), large = 1 / (1 + e);  // sigmoids of -|x| and |x|
      t.loss = -advantage * (4 / tau) * (x < 0 ? small : large);
      t.ratio_slope = slope_of(-4 * advantage * small * large, r);
      break;
    }
    case Kind::kVespo: {
      t.log_slope = -phi * advantage;
      t.loss = t.log_slope * logp;
      break;
    }
  }
  return t;
}

LIGER_TOKEN_FUNCTION void write_token(const TokensArgs& a, int64_t i) {
  const Options& o = a.options;
  const int64_t sequence = (a.first + i) / a.length;
  if (a.mask && a.mask[i] == 0) {
    a.loss[i] = a.clipped[i] = a.slope[i] = 0;
    if (a.kl) a.kl[i] = 0;
    if (a.log_ratio) a.ratio_slope[i] = 0;
    return;
  }
  const float logp = a.logp[i], mask = a.mask ? a.mask[i] : 1.f;
  const float old_logp = a.old_logp ? a.old_logp[i] : logp;
  const float r = expf(a.log_ratio ? a.log_ratio[sequence] : logp - old_logp);
  const Term t = policy_term(o, logp, r, a.advantage[sequence], a.phi ? a.phi[sequence] : 0.f);
  const float scale = (a.importance ? a.importance[a.importance_per_token ? i : sequence] : 1.f) * mask;
  float loss = t.loss * scale, log_slope = t.log_slope * scale, ratio_slope = t.ratio_slope * scale;
  if (a.ref_logp && o.beta != 0) {
    const float k = a.ref_logp[i] - logp, e = expm1f(k), kl = e - k, r_kl = o.bias_correction ? r : 1.f, beta = o.beta * mask;
    // expm1 of a large k is infinite, and so is kl
    loss += beta * (kl * r_kl);
    log_slope += beta * (-e * r_kl);
    if (o.bias_correction) ratio_slope += beta * (kl * r_kl);
    if (a.kl) a.kl[i] = kl * r_kl * mask;
  } else if (a.kl) {
    a.kl[i] = 0;
  }
  a.loss[i] = loss;
  a.clipped[i] = t.clipped * mask;
  a.slope[i] = a.log_ratio ? log_slope : log_slope + ratio_slope;
  if (a.log_ratio) a.ratio_slope[i] = ratio_slope;
}
