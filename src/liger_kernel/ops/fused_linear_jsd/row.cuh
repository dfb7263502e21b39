// The divergence of two rows of logits on CUDA: log-sums and sums over columns that threads, warps, blocks and clusters share, and the
// derivative by a logit. Include it inside an anonymous namespace, after ops/jsd/column.inl.h.

// log softmax of a row: z - top - log(sum), which keeps the precision of z - top.
struct LogSum {
  float top;
  float sum;  // of exp(z - top), top taken as 0 while it is -inf
};

__device__ __forceinline__ float ratio_of(float from, float to) { return from == to ? 1.f : __expf(from - to); }

__device__ __forceinline__ void merge(LogSum& a, float top, float sum) {
  const float both = fmaxf(a.top, top);
  a.sum = a.sum * ratio_of(a.top, both) + sum * ratio_of(top, both);
  a.top = both;
}

template <bool kFast, int kCount>
__device__ __forceinline__ void add(LogSum& a, const float (&z)[kCount]) {
  float top = a.top;
#pragma unroll
  for (int i = 0; i < kCount; ++i) top = fmaxf(top, z[i]);  // passes over NaN, which the exponentials bring in
  if (top > a.top) {
    a.sum *= exp_of<kFast>(a.top - top);
    a.top = top;
  }
  const float base = top == -INFINITY ? 0.f : top;
#pragma unroll
  for (int i = 0; i < kCount; ++i) a.sum += exp_of<kFast>(z[i] - base);
}

struct LogSoftmax {
  LogSoftmax() = default;
  __device__ __forceinline__ explicit LogSoftmax(const LogSum& s) : top(s.top), log_sum(logf(s.sum)) {}
  __device__ __forceinline__ float operator()(float z) const { return (z - top) - log_sum; }
  // log2 of a probability, bounded as mixture() of jsd/column.inl.h wants it
  __device__ __forceinline__ float log2(float z) const { return bounded(fmaf(z - top, kExpToExp2, -log_sum * kExpToExp2)); }
  float top, log_sum;
};

// Log-sums of the student's z, the teacher's, and the student's logits not tempered.
struct Share {
  LogSum student, teacher, hard;
};
__device__ __forceinline__ Share no_share() { return {{-INFINITY, 0.f}, {-INFINITY, 0.f}, {-INFINITY, 0.f}}; }

__device__ __forceinline__ void merge(Share& a, const Share& b) {
  merge(a.student, b.student.top, b.student.sum);
  merge(a.teacher, b.teacher.top, b.teacher.sum);
  merge(a.hard, b.hard.top, b.hard.sum);
}

__device__ __forceinline__ Share shuffled(const Share& s, int lanes) {
  Share r;
  r.student = {__shfl_xor_sync(~0u, s.student.top, lanes), __shfl_xor_sync(~0u, s.student.sum, lanes)};
  r.teacher = {__shfl_xor_sync(~0u, s.teacher.top, lanes), __shfl_xor_sync(~0u, s.teacher.sum, lanes)};
  r.hard = {__shfl_xor_sync(~0u, s.hard.top, lanes), __shfl_xor_sync(~0u, s.hard.sum, lanes)};
  return r;
}

__device__ __forceinline__ Share warp_merge(Share s) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) merge(s, shuffled(s, lanes));
  return s;
}

// Soft loss of the Jensen-Shannon divergence, by a column's logits, and its derivative.
template <Kind kKind, bool kFast>
struct Jsd {
  static constexpr bool kBase2 = kFast && kKind == Kind::kMixture;  // see mixture() of jsd/column.inl.h

  __device__ __forceinline__ Jsd(const Loss& loss, const Share& s)  // of tempered logits
      : student(s.student), teacher(s.teacher), scale(1 / loss.temperature), beta(loss.beta) {}
  __device__ __forceinline__ Column<float> operator()(float s, float t) const {
    if constexpr (kBase2) {
      const float x = log2_q(s), y = log2_p(t);
      return mixture(y - x, fmaxf(x, y), beta);
    } else {
      return column<kKind, kFast>(student(s * scale), teacher(t * scale), beta);
    }
  }
  __device__ __forceinline__ float log2_q(float s) const { return student.log2(rounded_product(s, scale)); }
  __device__ __forceinline__ float log2_p(float t) const { return teacher.log2(rounded_product(t, scale)); }

  LogSoftmax student, teacher;
  float scale, beta;
};

// By the student's logit, times `factor`. `slope` is the sum over the row of the columns' slopes.
template <Kind kKind, bool kFast>
struct JsdDerivative {
  using Soft = Jsd<kKind, kFast>;
  __device__ __forceinline__ JsdDerivative(const Soft& jsd, float slope, float factor)
      : jsd(jsd),
        factor(factor * jsd.scale * (Soft::kBase2 ? (1 - jsd.beta) * kLog2ToLog : 1.f)),
        mean(slope * (Soft::kBase2 ? factor * jsd.scale : 1.f)) {}
  __device__ __forceinline__ float operator()(float s, float t) const {
    if constexpr (Soft::kBase2) {
      const float x = jsd.log2_q(s), d = jsd.log2_p(t) - x, l = mixture_log2(d, exp2_fast(-fabsf(d)), jsd.beta);
      return exp2_fast(x) * fmaf(-fmaxf(d, 0.f) - l, factor, -mean);
    } else {
      const Column<float> c = jsd(s, t);
      return (kKind == Kind::kForward ? c.q - c.p : c.slope - c.q * mean) * factor;
    }
  }
  Soft jsd;
  float factor, mean;
};

__device__ __forceinline__ float not_negative(float loss) { return loss < 0 ? 0.f : loss; }  // a NaN stays

// What the label of a row says.
struct Label {
  __device__ __forceinline__ Label(const DivergenceArgs& a, int64_t row)
      : column(a.target ? a.target[row * a.target_stride] : -1),
        ignored(a.target && column == a.ignore_index),
        skipped(ignored || (a.hard && (column < 0 || column >= a.vocab))) {}
  __device__ __forceinline__ float constant() const { return ignored ? 0.f : NAN; }  // of loss and gradient of a skipped row
  int64_t column;
  bool ignored, skipped;
};

// The hard loss's part of the gradient; nothing without one. p - 1 of the label's own column is formed without cancellation.
template <bool kFast>
struct Hard {
  __device__ __forceinline__ Hard(const DivergenceArgs& a, const LogSum& sum, int64_t label, float share)
      : log_p(sum), label(label), scale(a.hard ? a.loss.hard_scale * share : 0.f) {}
  __device__ __forceinline__ float operator()(float logit, int64_t column) const {
    if (scale == 0) return 0;
    const float v = log_p(logit);
    return (column == label ? expm1f(v) : exp_of<kFast>(v)) * scale;
  }
  LogSoftmax log_p;
  int64_t label;
  float scale;
};
