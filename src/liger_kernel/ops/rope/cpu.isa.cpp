// RoPE on the CPU, compiled once per ISA. One pass: a token's cosines and sines are widened to fp32 once, sorted by pair, and
// stay in L1 while they turn every head of q and k; q and k are read once and written once.
#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/rope/rope.h>

namespace liger::rope {
namespace {

constexpr int64_t kBlock = 256;  // pairs whose table values are held at a time: 4 KB

// cos and sin of the first and second channel of each pair. For the inverse, sin is negated and the two change places.
struct Table {
  alignas(64) float cos1[kBlock], sin1[kBlock], cos2[kBlock], sin2[kBlock];
};

// The channel or column of pair i's first and second element.
struct Place {
  int64_t step, second;
  Place(Order order, int64_t half)
      : step(interleaved(order) ? 2 : 1),
        second(order == Order::kHalves  ? half
               : order == Order::kPairs ? 1
                                        : 0) {}
};

// Even and odd elements of the 2 * kLanes values (a, b), and the way back.
template <int... i>
void split(F a, F b, F& even, F& odd, std::integer_sequence<int, i...>) {
  even = __builtin_shufflevector(a, b, (2 * i)...);
  odd = __builtin_shufflevector(a, b, (2 * i + 1)...);
}
template <int... i>
void merge(F even, F odd, F& a, F& b, std::integer_sequence<int, i...>) {
  a = __builtin_shufflevector(even, odd, (i / 2 + i % 2 * kLanes)...);
  b = __builtin_shufflevector(even, odd, (kLanes / 2 + i / 2 + i % 2 * kLanes)...);
}
constexpr std::make_integer_sequence<int, kLanes> kSequence;

// n values from p on, `step` apart, times sign.
template <class C>
void widen_row(const C* p, int64_t step, int64_t n, float sign, float* out) {
  int64_t i = 0;
  if (step == 1) {
    for (; i + kLanes <= n; i += kLanes) store(load(p + i) * sign, out + i);
  } else {
    F even, odd;
    for (; i + kLanes < n; i += kLanes) {  // <: p may be the odd elements, and p[2n - 1] lies behind them
      split(load(p + 2 * i), load(p + 2 * i + kLanes), even, odd, kSequence);
      store(even * sign, out + i);
    }
  }
  for (; i < n; i++) out[i] = widen(p[i * step]) * sign;
}

// Pairs [first, first + n) of one token.
template <class C>
void fill(const RotateArgs& a, const C* cos, const C* sin, int64_t first, int64_t n, Table& t) {
  const Place place(a.table, a.rotary_dim / 2);
  if (a.table == Order::kComplex) sin = cos + 1;
  cos += first * place.step, sin += first * place.step;
  const float sign = a.inverse ? -1.f : 1.f;
  widen_row(cos, place.step, n, 1.f, t.cos1);
  widen_row(cos + place.second, place.step, n, 1.f, t.cos2);
  widen_row(sin, place.step, n, sign, a.inverse ? t.sin2 : t.sin1);
  widen_row(sin + place.second, place.step, n, sign, a.inverse ? t.sin1 : t.sin2);
}

// Pairs [first, first + n) of one head.
template <Order kInput, Order kOutput, class T>
void turn(const T* x, T* y, const Table& t, int64_t first, int64_t n, int64_t half) {
  const Place in(kInput, half), out(kOutput, half);
  x += first * in.step, y += first * out.step;
  const auto step = [&](int64_t i) {
    F x1, x2;
    if constexpr (kInput == Order::kHalves) {
      x1 = load(x + i), x2 = load(x + i + half);
    } else {
      split(load(x + 2 * i), load(x + 2 * i + kLanes), x1, x2, kSequence);
    }
    const F y1 = x1 * load(t.cos1 + i) - x2 * load(t.sin1 + i);
    const F y2 = x2 * load(t.cos2 + i) + x1 * load(t.sin2 + i);
    if constexpr (kOutput == Order::kHalves) {
      store(y1, y + i), store(y2, y + i + half);
    } else {
      F low, high;
      merge(y1, y2, low, high, kSequence);
      store(low, y + 2 * i), store(high, y + 2 * i + kLanes);
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step(i);
  if (i < n && n >= kLanes) return step(n - kLanes);  // the last whole vector again: inputs are unchanged, so are its values
  for (; i < n; i++) {
    const float x1 = widen(x[i * in.step]), x2 = widen(x[i * in.step + in.second]);
    y[i * out.step] = narrow<T>(x1 * t.cos1[i] - x2 * t.sin1[i]);
    y[i * out.step + out.second] = narrow<T>(x2 * t.cos2[i] + x1 * t.sin2[i]);
  }
}

template <class T>
using Turn = void (*)(const T*, T*, const Table&, int64_t, int64_t, int64_t);

template <class T>
Turn<T> choose_turn(Order input, Order output) {
  constexpr Order kHalves = Order::kHalves, kPairs = Order::kPairs;
  if (input == kHalves) return output == kHalves ? turn<kHalves, kHalves, T> : turn<kHalves, kPairs, T>;
  return output == kHalves ? turn<kPairs, kHalves, T> : turn<kPairs, kPairs, T>;
}

template <class T, class C>
void rotate_tokens(const RotateArgs& a, Turn<T> turn, int64_t begin, int64_t end) {
  const int64_t half = a.rotary_dim / 2, rest = a.head_dim - a.rotary_dim;
  Table table;
  for (int64_t row = begin; row < end; row++) {
    const int64_t b = row / a.tokens, t = row % a.tokens;
    const C* cos = static_cast<const C*>(a.cos) + b * a.cos_strides.batch + t * a.cos_strides.token;
    const C* sin = static_cast<const C*>(a.sin) + b * a.sin_strides.batch + t * a.sin_strides.token;
    for (int64_t first = 0; first < half; first += kBlock) {
      const int64_t n = half - first < kBlock ? half - first : kBlock;
      fill(a, cos, sin, first, n, table);
      const auto heads = [&](const void* in, void* out, const Strides& is, const Strides& os, int64_t count) {
        const T* x = static_cast<const T*>(in) + b * is.batch + t * is.token;
        T* y = static_cast<T*>(out) + b * os.batch + t * os.token;
        for (int64_t h = 0; h < count; h++, x += is.head, y += os.head) {
          turn(x, y, table, first, n, half);
          if (first == 0 && rest > 0) std::memcpy(y + a.rotary_dim, x + a.rotary_dim, rest * sizeof(T));
        }
      };
      heads(a.q, a.q_out, a.q_strides, a.q_out_strides, a.q_heads);
      heads(a.k, a.k_out, a.k_strides, a.k_out_strides, a.k_heads);
    }
  }
}

}  // namespace

void LIGER_STAMP(rotate)(const RotateArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    visit(a.table_dtype, [&]<class C>(Type<C>) {
      const int64_t grain = grain_for((a.q_heads + a.k_heads) * a.head_dim * sizeof(T));
      host.parallel_for(a.batch * a.tokens, grain,
                        [&](int64_t begin, int64_t end) { rotate_tokens<T, C>(a, choose_turn<T>(a.input, a.output), begin, end); });
    });
  });
}

}  // namespace liger::rope
