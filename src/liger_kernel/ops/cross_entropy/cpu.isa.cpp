// Cross entropy on the CPU, compiled once per ISA; threads take rows.
//
// A row is read twice: once for the sums, in blocks that stay in L1 (widen, find the block's maximum, then sum exponentials
// relative to it), once to write the gradient, from L2 for vocabularies up to a few hundred thousand. The target's column is
// left out of the sums, so that its gradient and loss have no cancellation. Sums of blocks are added in fp64.
#include <algorithm>

#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/cross_entropy/cross_entropy.h>

namespace liger::cross_entropy {
namespace {

#include <liger_kernel/ops/cross_entropy/finish.inl.h>

constexpr int64_t kBlock = 2048;       // columns
constexpr int64_t kStep = 4 * kLanes;  // of the loop over exponentials

// e^x for x <= 0, half the instructions of exp: <= 2 ULP, 0 below -87.3, NaN for NaN.
inline F exp_nonpositive(F x) {
  const F lowest = set(-87.3f), clamped = max(lowest, x);  // keeps a NaN
  const F magic = set(12582912.f + 127.f);                 // 1.5 * 2^23 rounds to an integer in the low bits; with the exponent's bias
  const F t = clamped * 1.44269504f + magic, n = t - magic;
  const F r = clamped - n * 0.693147182f;
  const F p =
      (((((r * 1.98527617e-4f + 1.39304355e-3f) * r + 8.33336077e-3f) * r + 4.16664853e-2f) * r + 0.166666672f) * r + 0.5f) * r + 1.f;
  const F y = (p * r + 1.f) * (F)((I)t << 23);
  return (F)((I)y & ~(x < lowest));
}

// x of a logit. kPlain: neither soft cap nor scale.
template <bool kPlain>
struct Transform {
  explicit Transform(const ForwardArgs& a) : scale(a.logit_scale), cap(a.softcap), inner(a.softcap > 0 ? a.logit_scale / a.softcap : 0) {}
  F operator()(F logit) const {
    if constexpr (kPlain) return logit;
    return cap > 0 ? tanh(logit * inner) * cap : logit * scale;
  }
  // dx/dlogit
  F slope(F x) const {
    const F t = x * (cap > 0 ? 1 / cap : 0.f);
    return (set(1.f) - t * t) * scale;
  }
  float scale, cap, inner;
};

// Columns [begin, end) into the sums; `weighted` is formed when kWeighted (w = 1 without weights).
template <class T, bool kPlain, bool kWeighted>
void accumulate(const T* logits, const float* weight, int64_t begin, int64_t end, const Transform<kPlain>& transform, RowSums& sums,
                double& exponentials, double& weighted) {
  alignas(kBytes) float x[kBlock];
  for (int64_t block = begin; block < end; block += kBlock) {
    const int64_t count = std::min(kBlock, end - block), body = count / kLanes * kLanes, tail = count - body;
    const T* p = logits + block;
    // 1. x, its maximum and weighted sum.
    F m0 = set(-kInf), m1 = m0, w0{}, w1{};
    const auto take = [&](int64_t j, F& m, F& w) {
      const F v = transform(load(p + j));
      store(v, x + j);
      m = max(v, m);
      if constexpr (kWeighted) w += weight ? v * load(weight + block + j) : v;
    };
    int64_t j = 0;
    for (; j + 2 * kLanes <= body; j += 2 * kLanes) take(j, m0, w0), take(j + kLanes, m1, w1);
    if (j < body) take(j, m0, w0);
    if (tail) {
      store(transform(load(p + body, tail)), x + body);
      for (int64_t i = count; i < body + kLanes; i++) x[i] = -kInf;
      m0 = max(load(x + body), m0);
      if constexpr (kWeighted) {
        for (int64_t i = body; i < count; i++) weighted += weight ? double(x[i]) * weight[block + i] : x[i];
      }
    }
    if constexpr (kWeighted) weighted += sum(w0 + w1);
    const float largest = max_lane(max(m0, m1)), safe = largest == -kInf ? 0.f : largest;

    // 2. Exponentials relative to the block's maximum.
    const int64_t padded = (count + kStep - 1) / kStep * kStep;
    for (int64_t i = (count + kLanes - 1) / kLanes * kLanes; i < padded; i++) x[i] = -kInf;
    F s0{}, s1{}, s2{}, s3{};
    for (int64_t i = 0; i < padded; i += kStep) {
      s0 += exp_nonpositive(load(x + i) - safe), s1 += exp_nonpositive(load(x + i + kLanes) - safe);
      s2 += exp_nonpositive(load(x + i + 2 * kLanes) - safe), s3 += exp_nonpositive(load(x + i + 3 * kLanes) - safe);
    }

    // 3. Merge.
    const float top = std::max(sums.largest, largest);
    exponentials = exponentials * ratio(sums.largest, top) + double(sum((s0 + s1) + (s2 + s3))) * ratio(largest, top);
    sums.largest = top;
  }
}

// Index of the first largest x; the first NaN when there is one.
template <class T, bool kPlain>
int64_t find_largest(const T* logits, int64_t vocab, const Transform<kPlain>& transform) {
  I iota{};
  for (int i = 0; i < kLanes; i++) iota[i] = i;
  F best = set(-kInf);
  I where = iota;
  const int64_t body = vocab / kLanes * kLanes, tail = vocab - body;
  const auto take = [&](F v, int64_t j) {
    v = select(v != v, set(kInf), v);
    const I better = v > best;
    best = select(better, v, best);
    where = (better & (iota + static_cast<int32_t>(j))) | (~better & where);
  };
  bool nan = false;
  for (int64_t j = 0; j < body; j += kLanes) {
    const F v = transform(load(logits + j));
    nan |= any(v != v);
    take(v, j);
  }
  F last = tail ? transform(load(logits + body, tail)) : F{};
  for (int64_t i = tail; i < kLanes; i++) last[i] = -kInf;
  nan |= any(last != last);
  if (tail) take(last, body);
  if (nan) {
    for (int64_t j = 0; j < vocab; j++) {
      const float v = transform(load(logits + j, 1))[0];
      if (v != v) return j;
    }
  }
  int64_t index = vocab;
  const float largest = max_lane(best);
  for (int i = 0; i < kLanes; i++) {
    if (best[i] == largest && where[i] < index) index = where[i];
  }
  return index;
}

constexpr int kAhead = 1024;  // bytes

// dlogit of columns [begin, end). Lines of the gradient are fetched ahead, for writing, and those of the next row's logits with them
// (`next`, or nullptr): a store to a line that is not in the cache holds up all later ones, and nothing else reads memory meanwhile.
template <class T, bool kPlain, bool kWeighted>
void write_gradient(const T* logits, T* grad, const float* weight, int64_t begin, int64_t end, const Transform<kPlain>& transform,
                    const RowGradient& r, const T* next) {
  const auto dlogit = [&](F logit, F w) {
    const F x = transform(logit);
    F d = exp_nonpositive(x - r.top) * r.scale;
    if constexpr (kWeighted) d -= w * r.shift;
    return kPlain ? d : d * transform.slope(x);
  };
  const auto weight_at = [&](int64_t j) { return kWeighted && weight ? load(weight + j) : set(1.f); };
  int64_t j = begin;
  for (; j + 2 * kLanes <= end; j += 2 * kLanes) {
    for (int64_t line = 0; line < int64_t{2 * kLanes * sizeof(T)}; line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(grad + j) + kAhead + line, 1);
      if (next) __builtin_prefetch(reinterpret_cast<const char*>(next + j) + line, 0, 2);
    }
    const F a = dlogit(load(logits + j), weight_at(j)), b = dlogit(load(logits + j + kLanes), weight_at(j + kLanes));
    store(a, grad + j), store(b, grad + j + kLanes);
  }
  for (; j + kLanes <= end; j += kLanes) store(dlogit(load(logits + j), weight_at(j)), grad + j);
  if (j < end) {
    const F w = kWeighted && weight ? load(weight + j, end - j) : set(1.f);
    store(dlogit(load(logits + j, end - j), w), grad + j, end - j);
  }
}

template <class T>
void fill(T* grad, int64_t vocab, float value) {
  std::fill(grad, grad + vocab, narrow<T>(value));
}

template <class T, bool kPlain, bool kWeighted>
void forward_rows(const ForwardArgs& a, int64_t begin, int64_t end) {
  const Transform<kPlain> transform(a);
  for (int64_t row = begin; row < end; row++) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
    T* grad = a.grad ? static_cast<T*>(a.grad) + row * a.grad_stride : nullptr;
    const int64_t y = a.target[row * a.target_stride];
    const bool ignored = y == a.ignore_index;
    if (ignored || y < 0 || y >= a.vocab) {
      const float value = ignored ? 0.f : std::numeric_limits<float>::quiet_NaN();
      if (grad) fill(grad, a.vocab, value);
      a.loss[row] = value;
      if (a.z_loss) a.z_loss[row] = value;
      if (a.hit) a.hit[row] = 0;
      if (a.prediction) a.prediction[row] = -1;
      continue;
    }

    RowSums sums{.target = transform(load(logits + y, 1))[0]};
    double exponentials = 0, weighted = 0;
    accumulate<T, kPlain, kWeighted>(logits, a.class_weight, 0, y, transform, sums, exponentials, weighted);
    accumulate<T, kPlain, kWeighted>(logits, a.class_weight, y + 1, a.vocab, transform, sums, exponentials, weighted);
    if (kWeighted) weighted += double(sums.target) * (a.class_weight ? a.class_weight[y] : 1.f);
    sums.others = static_cast<float>(exponentials);
    sums.weighted = static_cast<float>(weighted);

    const Row r(a, *a.stats, row, y, sums);
    a.loss[row] = r.loss();
    if (a.z_loss) a.z_loss[row] = r.z_loss();
    if (a.hit || a.prediction) {
      const int64_t largest = find_largest(logits, a.vocab, transform);
      if (a.hit) a.hit[row] = largest == y ? 1.f : 0.f;
      if (a.prediction) a.prediction[row] = largest;
    }
    if (grad) {
      const float own = kPlain ? r.own() : r.own() * transform.slope(set(sums.target))[0];
      const RowGradient g = r.gradient();
      const T* next = row + 1 < end ? logits + a.logits_stride : nullptr;
      write_gradient<T, kPlain, kWeighted>(logits, grad, a.class_weight, 0, y, transform, g, next);
      write_gradient<T, kPlain, kWeighted>(logits, grad, a.class_weight, y + 1, a.vocab, transform, g, next);
      grad[y] = narrow<T>(own);
    }
  }
}

float factor_of(const ScaleArgs& a, int64_t row) {
  return visit(a.factor_dtype, [&]<class T>(Type<T>) { return widen(static_cast<const T*>(a.factor)[a.per_row ? row : 0]); });
}

template <class T>
void scale_rows(const ScaleArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const T* grad = static_cast<const T*>(a.grad) + row * a.grad_stride;
    T* out = static_cast<T*>(a.grad_out) + row * a.out_stride;
    const float factor = factor_of(a, row);
    if (factor == 1 && grad == out) continue;
    int64_t j = 0;
    for (; j + kLanes <= a.vocab; j += kLanes) store(load(grad + j) * factor, out + j);
    if (j < a.vocab) store(load(grad + j, a.vocab - j) * factor, out + j, a.vocab - j);
  }
}

}  // namespace

void LIGER_STAMP(label_stats)(const StatsArgs& a, const Host&) {
  double all = 0, chosen = 0;
  for (int64_t j = 0; a.class_weight && j < a.vocab; j++) all += a.class_weight[j];
  LabelStats s{};
  for (int64_t row = 0; row < a.rows; row++) {
    const int64_t y = a.target[row * a.target_stride];
    if (y == a.ignore_index) continue;
    s.count++;
    s.below += y < 0;
    s.above += y >= a.vocab;
    if (a.class_weight && y >= 0 && y < a.vocab) chosen += a.class_weight[y];
  }
  s.inverse_count = s.count ? 1.f / static_cast<float>(s.count) : 0.f;
  s.inverse_weight = a.class_weight && s.count ? 1.f / static_cast<float>(chosen) : s.inverse_count;
  s.weight_sum = a.class_weight ? static_cast<float>(all) : static_cast<float>(a.vocab);
  *a.stats = s;
}

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  const bool plain = a.softcap <= 0 && a.logit_scale == 1, weighted = a.label_smoothing > 0;
  visit(a.dtype, [&]<class T>(Type<T>) {
    const auto rows = plain      ? weighted ? forward_rows<T, true, true> : forward_rows<T, true, false>
                           : weighted ? forward_rows<T, false, true>
                                 : forward_rows<T, false, false>;
    host.parallel_for(a.rows, grain_for(a.vocab * 4), [&](int64_t begin, int64_t end) { rows(a, begin, end); });
  });
}

void LIGER_STAMP(totals)(const TotalsArgs& a, const Host&) {
  const auto sum = [&](const float* values) {
    double total = 0;
    for (int64_t row = 0; row < a.rows; row++) total += values[row];
    return static_cast<float>(total);
  };
  visit(a.dtype, [&]<class T>(Type<T>) {
    *static_cast<T*>(a.total) = narrow<T>(sum(a.loss));
    if (a.z_total) *static_cast<T*>(a.z_total) = narrow<T>(sum(a.z_loss));
  });
  if (a.accuracy) *a.accuracy = sum(a.hit) / static_cast<float>(std::max(a.stats->count, 1));
}

void LIGER_STAMP(scale)(const ScaleArgs& a, const Host& host) {
  if (!a.per_row && factor_of(a, 0) == 1 && a.grad == a.grad_out && a.grad_stride == a.out_stride) return;
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(a.rows, grain_for(a.vocab * sizeof(T)), [&](int64_t begin, int64_t end) { scale_rows<T>(a, begin, end); });
  });
}

}  // namespace liger::cross_entropy
