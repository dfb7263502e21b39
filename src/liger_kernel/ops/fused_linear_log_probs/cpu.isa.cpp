// Statistics and gradient of tiles of logits on the CPU, compiled once per ISA; threads take rows.
//
// Statistics read a tile's row once, in blocks that stay in L1: widen, find the block's maximum, then sum exponentials relative to
// it; blocks and tiles are merged in fp64. The gradient reads and writes the row once.
#include <algorithm>

#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/fused_linear_log_probs/fused_linear_log_probs.h>

namespace liger::fused_linear_log_probs {
namespace {

#include <liger_kernel/ops/fused_linear_log_probs/row.inl.h>

constexpr int64_t kBlock = 2048;       // columns
constexpr int64_t kStep = 2 * kLanes;  // of the loop over exponentials

// e^d for d <= 0 (a little above it still is right) and d, both cut off at kLowest: <= 2 ULP, 0 below, NaN for NaN.
struct Exponential {
  explicit Exponential(F d) : d(max(set(kLowest), d)) {  // keeps a NaN
    const F magic = set(12582912.f + 127.f);             // 1.5 * 2^23 rounds to an integer in the low bits; with the exponent's bias
    const F t = this->d * 1.44269504f + magic, n = t - magic;
    const F r = this->d - n * 0.693147182f;
    const F p =
        (((((r * 1.98527617e-4f + 1.39304355e-3f) * r + 8.33336077e-3f) * r + 4.16664853e-2f) * r + 0.166666672f) * r + 0.5f) * r + 1.f;
    const F y = (p * r + 1.f) * (F)((I)t << 23);
    e = (F)((I)y & ~(d < set(kLowest)));
  }
  F d, e;
};

struct Lanes {
  F others{}, weighted{};
  I equal{};  // minus the number of elements equal to the largest

  void take(F z, float largest) {
    const I same = z == set(largest);
    const Exponential x(z - largest);
    const F e = (F)((I)x.e & ~same);
    others += e;
    weighted += e * x.d;
    equal += same;
  }
};

// z[0, count) and its sums; z is padded with -inf to a multiple of kStep.
inline Sums<double> block_sums(const float* z, int64_t count, float largest) {
  Sums<double> s{.largest = largest};
  if (largest == -kInf) {  // nothing but -inf, and perhaps NaN
    s.others = static_cast<double>(count) - 1;
    for (int64_t i = 0; i < count; i++) s.others += z[i] != z[i] ? z[i] : 0.f;
    return s;
  }
  Lanes l0, l1;
  for (int64_t i = 0; i < count; i += kStep) l0.take(load(z + i), largest), l1.take(load(z + i + kLanes), largest);
  const I equal = l0.equal + l1.equal;
  int64_t same = 0;
  for (int i = 0; i < kLanes; i++) same -= equal[i];
  s.others = double(sum(l0.others + l1.others)) + static_cast<double>(same - 1);
  s.weighted = sum(l0.weighted + l1.weighted);
  return s;
}

template <class T, bool kPlain>
Sums<double> tile_sums(const T* logits, int64_t cols, const ToZ<kPlain>& to_z) {
  alignas(kBytes) float z[kBlock];
  Sums<double> sums;
  for (int64_t block = 0; block < cols; block += kBlock) {
    const int64_t count = std::min(kBlock, cols - block), body = count / kLanes * kLanes, tail = count - body;
    const T* p = logits + block;
    F m0 = set(-kInf), m1 = m0;
    const auto take = [&](int64_t j, F& m) {
      const F v = to_z(load(p + j));
      store(v, z + j);
      m = max(v, m);
    };
    int64_t j = 0;
    for (; j + 2 * kLanes <= body; j += 2 * kLanes) take(j, m0), take(j + kLanes, m1);
    if (j < body) take(j, m0);
    if (tail) {
      store(to_z(load(p + body, tail)), z + body);
      for (int64_t i = count; i < body + kLanes; i++) z[i] = -kInf;
      m0 = max(load(z + body), m0);
    }
    for (int64_t i = (count + kLanes - 1) / kLanes * kLanes; i < (count + kStep - 1) / kStep * kStep; i++) z[i] = -kInf;
    merge(sums, block_sums(z, count, max_lane(max(m0, m1))));
  }
  return sums;
}

// Key of the first largest z; the first NaN when there is one.
template <class T, bool kPlain>
unsigned long long tile_best(const T* logits, int64_t cols, int64_t first, const ToZ<kPlain>& to_z) {
  I iota{};
  for (int i = 0; i < kLanes; i++) iota[i] = i;
  F best = set(-kInf);
  I where = iota, nan{};
  const int64_t body = cols / kLanes * kLanes, tail = cols - body;
  const auto take = [&](F v, int64_t j) {
    nan |= v != v;
    const I better = v > best;
    best = select(better, v, best);
    where = (better & (iota + static_cast<int32_t>(j))) | (~better & where);
  };
  for (int64_t j = 0; j < body; j += kLanes) take(to_z(load(logits + j)), j);
  if (tail) {
    F last = to_z(load(logits + body, tail));
    for (int64_t i = tail; i < kLanes; i++) last[i] = -kInf;
    take(last, body);
  }
  if (any(nan)) {
    for (int64_t j = 0; j < cols; j++) {
      const float v = to_z(load(logits + j, 1))[0];
      if (v != v) return best_key(v, static_cast<uint32_t>(first + j));
    }
  }
  unsigned long long key = 0;
  for (int i = 0; i < kLanes; i++) {
    if (where[i] < cols) key = std::max(key, best_key(best[i], static_cast<uint32_t>(first + where[i])));
  }
  return key;
}

template <class T, bool kPlain>
void statistics_rows(const StatisticsArgs& a, int64_t begin, int64_t end) {
  const ToZ<kPlain> to_z(a.transform);
  const bool last = a.first + a.cols == a.vocab;
  for (int64_t row = begin; row < end; row++) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
    const int64_t y = a.target[row * a.target_stride], column = y - a.first;
    const bool ignored = y == a.ignore_index;
    if (ignored || !valid_target(y, a.vocab)) {
      if (last) write_constants(a.results, row, ignored ? 0.f : std::numeric_limits<float>::quiet_NaN());
      continue;
    }
    RowState state{.largest = -kInf, .target = 0, .others = -1, .weighted = 0, .best = 0};
    if (a.first > 0) state = a.state[row];
    Sums<double> sums{.largest = state.largest, .others = state.others, .weighted = state.weighted};
    merge(sums, tile_sums<T>(logits, a.cols, to_z));
    state.largest = sums.largest, state.others = sums.others, state.weighted = sums.weighted;
    if (column >= 0 && column < a.cols) state.target = to_z(load(logits + column, 1))[0];
    if (a.results.prediction) state.best = std::max(state.best, tile_best<T>(logits, a.cols, a.first, to_z));
    if (last) {
      write_results(a.results, row, state);
    } else {
      a.state[row] = state;
    }
  }
}

template <class T, bool kPlain>
void gradient_rows(const GradientArgs& a, int64_t begin, int64_t end) {
  const ToZ<kPlain> to_z(a.transform);
  for (int64_t row = begin; row < end; row++) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
    T* grad = static_cast<T*>(a.grad) + row * a.grad_stride;
    const int64_t y = a.target[row * a.target_stride], column = y - a.first;
    const bool ignored = y == a.ignore_index;
    if (ignored || !valid_target(y, a.vocab)) {
      std::fill(grad, grad + a.cols, narrow<T>(ignored ? 0.f : std::numeric_limits<float>::quiet_NaN()));
      continue;
    }
    const RowFactors r(a, row);
    const auto derive = [&](F logit) {
      const F z = to_z(logit);
      const Exponential x(z - r.largest);
      const F d = x.e * (x.d * r.b + r.a);
      return kPlain ? d : d * to_z.slope(z);
    };
    const bool here = column >= 0 && column < a.cols;
    const float own = here ? r.own * to_z.slope(to_z(load(logits + column, 1)))[0] : 0.f;
    int64_t j = 0;
    for (; j + 2 * kLanes <= a.cols; j += 2 * kLanes) {
      const F d0 = derive(load(logits + j)), d1 = derive(load(logits + j + kLanes));
      store(d0, grad + j), store(d1, grad + j + kLanes);
    }
    for (; j + kLanes <= a.cols; j += kLanes) store(derive(load(logits + j)), grad + j);
    if (j < a.cols) store(derive(load(logits + j, a.cols - j)), grad + j, a.cols - j);
    if (here) grad[column] = narrow<T>(own);
  }
}

}  // namespace

void LIGER_STAMP(statistics)(const StatisticsArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const auto rows = plain(a.transform) ? statistics_rows<T, true> : statistics_rows<T, false>;
    host.parallel_for(a.rows, grain_for(a.cols * 4), [&](int64_t begin, int64_t end) { rows(a, begin, end); });
  });
}

void LIGER_STAMP(gradient)(const GradientArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const auto rows = plain(a.transform) ? gradient_rows<T, true> : gradient_rows<T, false>;
    host.parallel_for(a.rows, grain_for(a.cols * 4), [&](int64_t begin, int64_t end) { rows(a, begin, end); });
  });
}

}  // namespace liger::fused_linear_log_probs
