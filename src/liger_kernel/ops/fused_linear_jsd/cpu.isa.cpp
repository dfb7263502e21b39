// The divergence of two rows of logits on the CPU, compiled once per ISA; threads take rows. A pair of rows is read for the log-sums, for
// the sums of the divergence, and for the gradient: after the first time from L2.
#include <algorithm>
#include <array>

#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/fused_linear_jsd/fused_linear_jsd.h>

namespace liger::fused_linear_jsd {
namespace {

#include <liger_kernel/ops/jsd/column.inl.h>

constexpr int64_t kBlock = 2048;  // columns: fp32 sums no longer than that, then fp64

// log softmax of a row: z - top - log_sum, which keeps the precision of z - top.
struct LogSum {
  float top = -kInf;
  double sum = 0;  // of exp(z - top)
  float log_sum = 0;

  void add(float block_top, double block_sum) {
    const float both = std::max(top, block_top);
    const auto ratio = [&](float from) { return from == both ? 1. : std::exp(double(from) - both); };
    sum = sum * ratio(top) + block_sum * ratio(block_top);
    top = both;
  }
  F log_p(F z) const { return (z - top) - log_sum; }
};

// Of scale * p[0, count) and `zeros` entries of 0.
template <class T>
LogSum log_sum_of(const T* p, int64_t count, float scale, int64_t zeros = 0) {
  alignas(kBytes) float z[kBlock];
  LogSum total;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t n = std::min(kBlock, count - first);
    F top = set(-kInf);
    for (int64_t j = 0; j < n; j += kLanes) {
      const F v = (n - j >= kLanes ? load(p + first + j) : load(p + first + j, n - j, -kInf)) * scale;
      store(v, z + j);
      top = max(v, top);
    }
    const float largest = max_lane(top), safe = largest == -kInf ? 0.f : largest;
    F sums{};
    for (int64_t j = 0; j < n; j += kLanes) sums += exp(load(z + j) - safe);
    total.add(largest, sum(sums));
  }
  if (zeros > 0) total.add(0, static_cast<double>(zeros));
  total.log_sum = static_cast<float>(std::log(total.sum));
  return total;
}

// body(x, y, sums) for whole vectors of both rows; beyond the student's entries x is `x_rest`, beyond the last column both are `fill`.
template <int kSums, class T, class U, class Body>
std::array<double, kSums> sums_over(const T* x, const U* y, int64_t x_count, int64_t count, float scale, float fill, Body&& body) {
  std::array<double, kSums> total{};
  for (int64_t first = 0; first < count;) {
    const bool own = first < x_count;
    const int64_t stop = std::min(own ? x_count : count, first + kBlock);
    std::array<F, kSums> sums{};
    for (int64_t j = first; j < stop; j += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, stop - j);
      const F v = n == kLanes ? load(y + j) : load(y + j, n, fill);
      F u{};
      if (own) u = (n == kLanes ? load(x + j) : load(x + j, n, fill)) * scale;
      if (!own && n < kLanes) {
        for (int64_t i = n; i < kLanes; i++) u[i] = fill;
      }
      body(u, v, sums);
    }
    for (int i = 0; i < kSums; i++) total[i] += sum(sums[i]);
    first = stop;
  }
  return total;
}

// Each: the soft loss of a row, and its derivative by a logit.
template <class T, class U, Kind kKind>
struct Jsd {
  Jsd(const DivergenceArgs& a, const T* x, const U* y) : scale(1 / a.loss.temperature), beta(a.loss.beta) {
    student = log_sum_of(x, a.vocab, scale, a.teacher_vocab - a.vocab);
    teacher = log_sum_of(y, a.teacher_vocab, scale);
    const auto sums = sums_over<2>(x, y, a.vocab, a.teacher_vocab, scale, -kInf, [&](F z, F t, std::array<F, 2>& s) {
      const Column<F> c = column<kKind, false>(student.log_p(z), teacher.log_p(t * scale), beta);
      s[0] += c.loss, s[1] += c.slope;
    });
    loss = sums[0] < 0 ? 0.f : static_cast<float>(sums[0]);
    slope = static_cast<float>(sums[1]);
  }
  F operator()(F x, F y) const {
    const Column<F> c = column<kKind, false>(student.log_p(x * scale), teacher.log_p(y * scale), beta);
    return (kKind == Kind::kForward ? c.q - c.p : c.slope - c.q * slope) * scale;
  }
  float scale, beta, loss, slope;
  LogSum student, teacher;
};

template <class T, class U>
struct Cosine {
  Cosine(const DivergenceArgs& a, const T* x, const U* y) {
    const auto sums = sums_over<3>(x, y, a.vocab, a.teacher_vocab, 1.f, 0.f,
                                   [&](F s, F t, std::array<F, 3>& sum) { sum[0] += s * s, sum[1] += t * t, sum[2] += s * t; });
    const double least = 1e-8 * a.loss.temperature, norm = std::sqrt(sums[0]);
    const double s = std::max(norm, least), t = std::max(std::sqrt(sums[1]), least);
    const double cosine = sums[2] / (s * t);
    loss = a.loss.beta * static_cast<float>(cosine > 1 ? 0. : 1 - cosine);
    other = static_cast<float>(a.loss.beta / (s * t)), own = norm < least ? 0.f : static_cast<float>(a.loss.beta * cosine / (s * s));
  }
  F operator()(F x, F y) const { return x * own - y * other; }
  float loss, own, other;
};

template <class T, class U>
struct Probabilities {
  Probabilities(const DivergenceArgs& a, const T* x, const U* y) : scale(1 / a.loss.temperature) {
    student = log_sum_of(x, a.vocab, scale);
    const float eps = std::max(a.loss.eps, std::numeric_limits<float>::min());
    const auto sums = sums_over<2>(x, y, a.vocab, a.vocab, scale, 0.f, [&](F z, F p, std::array<F, 2>& s) {
      s[0] += times(p, log(max(set(eps), p)) - student.log_p(z)), s[1] += p;
    });
    loss = static_cast<float>(sums[0]), total = static_cast<float>(sums[1]);
  }
  F operator()(F x, F p) const { return (exp(student.log_p(x * scale)) * total - p) * scale; }
  float scale, loss, total;
  LogSum student;
};

template <class T>
void fill(T* row, int64_t count, float value) {
  std::fill(row, row + count, narrow<T>(value));
}

template <class T, class U, class Soft>
void divergence_rows(const DivergenceArgs& a, int64_t begin, int64_t end) {
  const float share = a.stats ? a.stats->inverse_count : 1.f, soft_scale = a.loss.soft_scale * share,
              hard_scale = a.loss.hard_scale * share;
  for (int64_t row = begin; row < end; row++) {
    T* x = static_cast<T*>(a.student) + row * a.student_stride;
    const U* y = static_cast<const U*>(a.teacher) + (a.teacher_row ? a.teacher_row[row] : row) * a.teacher_stride;
    const int64_t label = a.target ? a.target[row * a.target_stride] : 0;
    const bool ignored = a.target && label == a.ignore_index, astray = a.hard && (label < 0 || label >= a.vocab);
    if (ignored || astray) {
      const float value = ignored ? 0.f : std::numeric_limits<float>::quiet_NaN();
      a.soft[row] = value;
      if (a.hard) a.hard[row] = value;
      if (a.gradient) fill(x, a.vocab, value);
      continue;
    }
    const Soft soft(a, x, y);
    a.soft[row] = soft.loss;
    LogSum hard;
    float log_p = 0;
    if (a.hard) {
      hard = log_sum_of(x, a.vocab, 1.f);
      log_p = hard.log_p(load(x + label, 1))[0];
      a.hard[row] = -log_p;
    }
    if (!a.gradient) continue;

    const auto derive = [&](F s, F t) { return soft(s, t) * soft_scale; };
    // The label's own column is formed before it is overwritten: p - 1 without cancellation.
    const float own = a.hard ? derive(load(x + label, 1), load(y + label, 1))[0] + hard_scale * std::expm1(log_p) : 0.f;
    const bool both = a.hard && hard_scale != 0;
    for (int64_t j = 0; j < a.vocab; j += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, a.vocab - j);
      const F s = n == kLanes ? load(x + j) : load(x + j, n), t = n == kLanes ? load(y + j) : load(y + j, n);
      F d = derive(s, t);
      if (both) d += exp(hard.log_p(s)) * hard_scale;
      n == kLanes ? store(d, x + j) : store(d, x + j, n);
    }
    if (both) x[label] = narrow<T>(own);
  }
}

// The caller's probabilities have a type of their own.
template <class T, class Body>
void visit_loss(const DivergenceArgs& a, Body&& body) {
  switch (a.loss.divergence) {
    case Divergence::kJensenShannon:
      return visit_kind(kind_of(a.loss.beta), [&]<Kind kKind>() { body(divergence_rows<T, T, Jsd<T, T, kKind>>); });
    case Divergence::kCosine: return body(divergence_rows<T, T, Cosine<T, T>>);
    case Divergence::kProbabilities:
      return visit(a.teacher_dtype, [&]<class U>(Type<U>) { body(divergence_rows<T, U, Probabilities<T, U>>); });
  }
}

}  // namespace

void LIGER_STAMP(divergence)(const DivergenceArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    visit_loss<T>(a, [&](auto rows) {
      host.parallel_for(a.rows, grain_for(a.teacher_vocab * 16), [&](int64_t begin, int64_t end) { rows(a, begin, end); });
    });
  });
}

}  // namespace liger::fused_linear_jsd
