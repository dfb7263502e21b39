// Gated RMSNorm on the CPU, compiled once per ISA. Each element's exponential is computed once: what the second pass over a group needs
// of it waits in fp32 rows of scratch, which stay in L1 or L2. In backward each thread adds dw over its own rows into an fp32 row, and
// those of all threads are added in thread order, so the result does not depend on timing.
#include <liger_kernel/core/cpu/gated.inl.h>
#include <liger_kernel/core/cpu/rms.inl.h>
#include <liger_kernel/core/cpu/vectors.inl.h>
#include <liger_kernel/ops/rms_norm_gated/rms_norm_gated.h>

#include <liger_kernel/ops/rms_norm_gated/gate.inl.h>

namespace liger::rms_norm_gated {
namespace {

// The mean over a row of term(j, n). Lanes add up short runs, and then the runs: long fp32 sums of bf16 squares lose their ties to one
// side.
template <class Term>
float mean_of(int64_t cols, Term&& term) {
  constexpr int64_t kStep = 4 * kLanes;
  const int64_t wide = cols / kStep * kStep, whole = cols / kLanes * kLanes;
  double total = 0;
  int64_t j = 0;
  while (j < wide) {
    F s0{}, s1{}, s2{}, s3{};
    for (const int64_t stop = wide < j + kRun ? wide : j + kRun; j < stop; j += kStep) {
      s0 += term(j, All{}), s1 += term(j + kLanes, All{}), s2 += term(j + 2 * kLanes, All{}), s3 += term(j + 3 * kLanes, All{});
    }
    total += sum((s0 + s1) + (s2 + s3));
  }
  F rest{};
  for (; j < whole; j += kLanes) rest += term(j, All{});
  if (j < cols) rest += term(j, cols - j);
  return static_cast<float>((total + sum(rest)) / static_cast<double>(cols));
}

// Where values are rounded to T.
template <class T>
struct Roundings {
  bool hat, product;

  F scaled(F value, F weight) const {
    const F result = (hat ? nearest<T>(value) : value) * weight;
    return product ? nearest<T>(result) : result;
  }
};

// The weight in fp32, ones without one: the caller's own array where it is fp32, else in `memory`.
template <class Args>
const float* weight_of(const Args& a, const Host& host, Scratch& memory) {
  if (a.weight && a.weight_dtype == DType::kF32) return static_cast<const float*>(a.weight);
  memory = host.scratch(a.cols * sizeof(float));
  visit(a.weight_dtype, [&]<class W>(Type<W>) {
    for_each_vector(a.cols, [&](int64_t j, auto n) {
      store(a.weight ? load(static_cast<const W*>(a.weight) + j, n) : set(1.f), memory.as<float>() + j, n);
    });
  });
  return memory.as<float>();
}

template <class T, class N>
F gate_at(const T* gate, int64_t j, N n) {
  return gate ? load(gate + j, n) : set(kOpen);
}

// An fp32 row for values of a group, which take whole vectors in it.
int64_t buffer_size(int64_t group_size) { return (group_size + kLanes - 1) / kLanes * kLanes; }

// `buffer`: one row.
template <class T, bool kNormFirst>
void forward_rows(const ForwardArgs& a, const float* weights, float* buffer, int64_t begin, int64_t end) {
  const int64_t cols = a.group_size, groups = a.cols / cols;
  const Gate<T> gate = Gate<T>::of(a);
  const Roundings<T> round{a.rounding == Rounding::kBeforeWeight, rounds_product(a)};
  for (int64_t i = begin * groups; i < end * groups; i++) {
    const int64_t row = i / groups, first = (i - row * groups) * cols;
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride + first;
    const T* z = a.gate ? static_cast<const T*>(a.gate) + row * a.gate_stride + first : nullptr;
    T* y = static_cast<T*>(a.y) + row * a.y_stride + first;
    const float* weight = weights + first;

    const float mean = mean_of(cols, [&](int64_t j, auto n) {
      const F h = kNormFirst ? load(x + j, n) : load(x + j, n) * gate.value(gate_at(z, j, n));
      if (!kNormFirst) store(h, buffer + j);
      return h * h;
    });
    const float rstd = 1.f / std::sqrt(mean + a.eps);
    a.rstd[i] = rstd;

    for_each_vector(cols, [&](int64_t j, auto n) {
      const F w = load(weight + j, n);
      if constexpr (kNormFirst) {
        store(round.scaled(load(x + j, n) * rstd, w) * gate.value(gate_at(z, j, n)), y + j, n);
      } else {
        store(round.scaled(load(buffer + j) * rstd, w), y + j, n);
      }
    });
  }
}

// `buffer`: two rows. dw may be nullptr.
template <class T, bool kNormFirst>
void backward_rows(const BackwardArgs& a, const float* weights, float* buffer, float* dw, int64_t begin, int64_t end) {
  const int64_t cols = a.group_size, groups = a.cols / cols;
  const Gate<T> gate = Gate<T>::of(a);
  const Roundings<T> round{a.rounding == Rounding::kBeforeWeight, rounds_product(a)};
  float *kept = buffer, *kept_slope = buffer + buffer_size(cols);
  for (int64_t i = begin * groups; i < end * groups; i++) {
    const int64_t row = i / groups, first = (i - row * groups) * cols;
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride + first;
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride + first;
    const T* z = a.gate ? static_cast<const T*>(a.gate) + row * a.gate_stride + first : nullptr;
    T* dx = a.dx ? static_cast<T*>(a.dx) + row * a.dx_stride + first : nullptr;
    T* dgate = a.dgate ? static_cast<T*>(a.dgate) + row * a.dgate_stride + first : nullptr;
    const float* weight = weights + first;
    float* sums = dw ? dw + first : nullptr;
    const float rstd = a.rstd[i];
    const auto add = [&](F term, int64_t j, auto n) {
      if (sums) store(load(sums + j, n) + term, sums + j, n);
    };

    if constexpr (kNormFirst) {
      // Kept: dy a.
      const float mean = mean_of(cols, [&](int64_t j, auto n) {
        F slope;
        const F v = load(x + j, n), w = load(weight + j, n), d = load(dy + j, n), hat = v * rstd;
        const F t = d * gate.value(gate_at(z, j, n), slope);
        store(t, kept + j);
        add(t * (round.hat ? nearest<T>(hat) : hat), j, n);
        if (dgate) store(d * round.scaled(hat, w) * slope, dgate + j, n);
        return t * w * v;
      });
      if (!dx) continue;
      const float c = mean * rstd * rstd;
      for_each_vector(cols,
                      [&](int64_t j, auto n) { store((load(kept + j) * load(weight + j, n) - load(x + j, n) * c) * rstd, dx + j, n); });
    } else {
      // Kept: a, and x act'(gate).
      const float mean = mean_of(cols, [&](int64_t j, auto n) {
        F slope;
        const F v = load(x + j, n), d = load(dy + j, n), value = gate.value(gate_at(z, j, n), slope), h = v * value, hat = h * rstd;
        store(value, kept + j);
        store(v * slope, kept_slope + j);
        add(d * (round.hat ? nearest<T>(hat) : hat), j, n);
        return d * load(weight + j, n) * h;
      });
      if (!dx && !dgate) continue;
      const float c = mean * rstd * rstd;
      for_each_vector(cols, [&](int64_t j, auto n) {
        const F value = load(kept + j), dh = (load(dy + j, n) * load(weight + j, n) - load(x + j, n) * value * c) * rstd;
        if (dx) store(dh * value, dx + j, n);
        if (dgate) store(dh * load(kept_slope + j), dgate + j, n);
      });
    }
  }
}

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  Scratch memory;
  const float* weight = weight_of(a, host, memory);
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(a.rows, grain_for(2 * a.cols * sizeof(T)), [&](int64_t begin, int64_t end) {
      if (a.norm_first) return forward_rows<T, true>(a, weight, nullptr, begin, end);
      const Scratch buffer = host.scratch(buffer_size(a.group_size) * sizeof(float));
      forward_rows<T, false>(a, weight, buffer.as<float>(), begin, end);
    });
  });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  Scratch memory;
  const float* weight = weight_of(a, host, memory);
  rms_backward(a, host, [&]<class T, class W>(float* dw, int64_t first, int64_t last) {
    const Scratch buffer = host.scratch(2 * buffer_size(a.group_size) * sizeof(float));
    if (a.norm_first) return backward_rows<T, true>(a, weight, buffer.as<float>(), dw, first, last);
    backward_rows<T, false>(a, weight, buffer.as<float>(), dw, first, last);
  });
}

}  // namespace liger::rms_norm_gated
