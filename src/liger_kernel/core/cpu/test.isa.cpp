// See test_simd.h.
#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/core/cpu/test_simd.h>

namespace liger::test {
namespace {

// out[i] = function(in[i]) by whole vectors and one partial.
template <class In, class Out, class Function>
void map(const In* in, Out* out, int64_t n, Function&& function) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(function(load(in + i)), out + i);
  if (i < n) store(function(load(in + i, n - i)), out + i, n - i);
}

constexpr auto kSame = [](F v) { return v; };

}  // namespace

const Simd& LIGER_STAMP(simd)() {
  static const Simd simd = {
      .lanes = kLanes,
      .widen = [](DType t, const void* in, float* out,
                  int64_t n) { visit(t, [&]<class T>(Type<T>) { map(static_cast<const T*>(in), out, n, kSame); }); },
      .narrow = [](DType t, const float* in, void* out,
                   int64_t n) { visit(t, [&]<class T>(Type<T>) { map(in, static_cast<T*>(out), n, kSame); }); },
      .round = [](DType t, const float* in, float* out,
                  int64_t n) { visit(t, [&]<class T>(Type<T>) { map(in, out, n, [](F v) { return rounded<T>(v); }); }); },
      .exp = [](const float* in, float* out, int64_t n) { map(in, out, n, [](F v) { return liger::exp(v); }); },
      .tanh = [](const float* in, float* out, int64_t n) { map(in, out, n, [](F v) { return liger::tanh(v); }); },
      .sigmoid = [](const float* in, float* out, int64_t n) { map(in, out, n, [](F v) { return liger::sigmoid(v); }); },
      .sum = [](const float* in) { return liger::sum(load(in)); },
      .max_lane = [](const float* in) { return liger::max_lane(load(in)); },
      .max = [](const float* a, const float* b, float* out) { store(liger::max(load(a), load(b)), out); },
      .min = [](const float* a, const float* b, float* out) { store(liger::min(load(a), load(b)), out); },
      .load_filled = [](DType t, const void* in, float* out, int64_t n,
                        float fill) { visit(t, [&]<class T>(Type<T>) { store(load(static_cast<const T*>(in), n, fill), out); }); },
      .widen_scalar = [](DType t, uint16_t bits) { return t == DType::kBF16 ? widen(BFloat16{bits}) : widen(Float16{bits}); },
      .narrow_scalar = [](DType t,
                          float v) { return t == DType::kBF16 ? liger::narrow<BFloat16>(v).bits : liger::narrow<Float16>(v).bits; },
  };
  return simd;
}

}  // namespace liger::test
