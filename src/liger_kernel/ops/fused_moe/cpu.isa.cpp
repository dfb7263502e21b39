// The passes between the products on the CPU, compiled once per ISA.
#include <algorithm>
#include <vector>

#include <liger_kernel/core/cpu/gated.inl.h>
#include <liger_kernel/ops/fused_moe/fused_moe.h>

#include <liger_kernel/ops/swiglu/silu.inl.h>

namespace liger::fused_moe {
namespace {

// A counting sort: count, prefix sums, and each choice to the next slot of its expert.
template <class Index>
void sort_by_expert(const RouteArgs& a) {
  const Index* index = static_cast<const Index*>(a.index);
  const auto expert = [&](int64_t i) { return index[i] < 0 || index[i] >= a.experts ? a.experts : static_cast<int64_t>(index[i]); };
  std::vector<int32_t> next(static_cast<size_t>(a.experts) + 2, 0);
  for (int64_t i = 0; i < a.slots; ++i) ++next[expert(i) + 1];
  for (int64_t e = 0; e <= a.experts; ++e) {
    next[e + 1] += next[e];
    a.starts[e] = next[e];
  }
  for (int64_t i = 0; i < a.slots; ++i) {
    const int32_t slot = next[expert(i)]++;
    a.order[slot] = static_cast<int32_t>(i);
    a.token[slot] = static_cast<int32_t>(i / a.top_k);
    a.place[i] = slot;
  }
}

template <class T>
void combine_token(const CombineArgs& a, int64_t token) {
  const T* y = static_cast<const T*>(a.y);
  T* out = static_cast<T*>(a.out) + token * a.cols;
  const int32_t* place = a.place + token * a.top_k;
  const float* weight = a.weight ? a.weight + token * a.top_k : nullptr;
  const int32_t used = a.starts[a.experts];
  const auto total = [&](auto&& read) {
    F sum{};
    for (int64_t k = 0; k < a.top_k; ++k) {
      if (place[k] < used) sum += read(y + place[k] * a.cols) * (weight ? weight[k] : 1.f);
    }
    return sum;
  };
  const int64_t body = a.cols / kLanes * kLanes, tail = a.cols - body;
  for (int64_t j = 0; j < body; j += kLanes) store(total([&](const T* row) { return load(row + j); }), out + j);
  if (tail) store(total([&](const T* row) { return load(row + body, tail); }), out + body, tail);
}

// One slot; `lanes...` is the number of elements for a tail. da, dh, weighted may be nullptr. -> da a, to be summed
template <class T, class... Lanes>
F gate_gradient_span(const T* da, const T* h, int64_t cols, float weight, T* dh, T* weighted, int64_t j, Lanes... lanes) {
  F slope;
  const F up = load(h + cols + j, lanes...), value = swiglu::Silu<T>{1.f}.value(load(h + j, lanes...), slope);
  const F a = nearest<T>(nearest<T>(value) * up);  // as forward stored it
  if (weighted) store(a * weight, weighted + j, lanes...);
  if (!da) return F{};
  const F g = load(da + j, lanes...);
  if (dh) {
    store(g * weight * up * slope, dh + j, lanes...);
    store(g * weight * value, dh + cols + j, lanes...);
  }
  return g * a;
}

template <class T>
float gate_gradient_row(const T* da, const T* h, int64_t cols, float weight, T* dh, T* weighted) {
  const int64_t body = cols / kLanes * kLanes, tail = cols - body;
  F dot{};
  for (int64_t j = 0; j < body; j += kLanes) dot += gate_gradient_span(da, h, cols, weight, dh, weighted, j);
  if (tail) dot += gate_gradient_span(da, h, cols, weight, dh, weighted, body, tail);
  return sum(dot);
}

}  // namespace

void LIGER_STAMP(route)(const RouteArgs& a, const Host&) { a.wide ? sort_by_expert<int64_t>(a) : sort_by_expert<int32_t>(a); }

void LIGER_STAMP(combine)(const CombineArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(a.tokens, grain_for((a.top_k + 1) * a.cols * sizeof(T)), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) combine_token<T>(a, t);
    });
  });
}

void LIGER_STAMP(gate_gradient)(const GateGradientArgs& a, const Host& host) {
  const int64_t used = a.starts[a.experts];
  if (a.dweight) {
    for (int64_t slot = used; slot < a.slots; ++slot) a.dweight[a.order[slot]] = 0;
  }
  visit(a.dtype, [&]<class T>(Type<T>) {
    const auto row = [&](auto* p, int64_t slot, int64_t width) {
      using P = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(p)>>, const T, T>;
      return p ? static_cast<P*>(p) + slot * width : nullptr;
    };
    host.parallel_for(used, grain_for(6 * a.cols * sizeof(T)), [&](int64_t begin, int64_t end) {
      for (int64_t slot = begin; slot < end; ++slot) {
        const int32_t choice = a.order[slot];
        const float dot = gate_gradient_row<T>(row(a.da, slot, a.cols), row(a.h, slot, 2 * a.cols), a.cols, a.weight[choice],
                                               row(a.dh, slot, 2 * a.cols), row(a.weighted, slot, a.cols));
        if (a.dweight) a.dweight[choice] = dot;
      }
    });
  });
}

void LIGER_STAMP(fetch)(const FetchArgs& a, const Host&) { std::copy_n(a.starts, a.count, a.out); }

void LIGER_STAMP(clear)(const ClearArgs& a, const Host& host) {
  host.parallel_for(a.bytes, grain_for(1),
                    [&](int64_t begin, int64_t end) { std::memset(static_cast<char*>(a.data) + begin, 0, end - begin); });
}

}  // namespace liger::fused_moe
