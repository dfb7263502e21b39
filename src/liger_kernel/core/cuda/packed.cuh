// What rows of exponentials are made of: base-2 functions of one instruction, and maxima of packed words.
#pragma once
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/vec.cuh>

namespace liger {
namespace {

constexpr float kExpToExp2 = 1.44269504f;   // log2(e)
constexpr float kLog2ToLog = 0.693147181f;  // ln(2)

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Absolute error of log2_fast: 2^-22 between 1/2 and 2.
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// exp(scale (x - largest)), largest taken as 0 while it is -inf. kFast, for 16-bit types: base 2, whose error of |argument| 2^-24 their own
// rounding hides. The difference is exact where it counts; scale x - scale largest in one instruction would be off by the size of x.
template <bool kFast>
struct Exponential {
  __device__ __forceinline__ explicit Exponential(float largest, float scale = 1)
      : scale(kFast ? scale * kExpToExp2 : scale), base(largest == -INFINITY ? 0.f : largest) {}
  __device__ __forceinline__ float operator()(float x) const {
    const float v = (x - base) * scale;
    return kFast ? exp2_fast(v) : expf(v);
  }
  // of sums relative to `from`, to make them relative to the largest
  __device__ __forceinline__ static float ratio(float from, float to, float scale = 1) {
    return from == to ? 1.f : Exponential(to, scale)(from);
  }
  float scale, base;
};

// A product that no addition joins to one instruction.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
// The larger; NaN if either is.
__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// 32-bit words of a vector: one fp32 or two 16-bit values. `kLowest` is -inf in each.
template <class T>
struct Word;
template <>
struct Word<float> {
  static constexpr int kValues = 1;
  static constexpr uint32_t kLowest = 0xff800000u;
  __device__ __forceinline__ static uint32_t max(uint32_t a, uint32_t b) {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
};
template <>
struct Word<BFloat16> {
  static constexpr int kValues = 2;
  static constexpr uint32_t kLowest = 0xff80ff80u;
  __device__ __forceinline__ static uint32_t max(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
};
template <>
struct Word<Float16> {
  static constexpr int kValues = 2;
  static constexpr uint32_t kLowest = 0xfc00fc00u;
  __device__ __forceinline__ static uint32_t max(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
};

template <class T>
__device__ __forceinline__ Vec<T> lowest() {
  return {make_uint4(Word<T>::kLowest, Word<T>::kLowest, Word<T>::kLowest, Word<T>::kLowest)};
}
template <class T>
__device__ __forceinline__ uint32_t max_word(const Vec<T>& v) {
  return Word<T>::max(Word<T>::max(v.raw.x, v.raw.y), Word<T>::max(v.raw.z, v.raw.w));
}
template <class T>
__device__ __forceinline__ float max_value(uint32_t word) {
  float values[Vec<T>::kSize];
  Vec<T>{make_uint4(word, word, word, word)}.to_float(values);
  return fmaxf(values[0], values[Word<T>::kValues - 1]);
}

// The largest of a warp; floats compare like integers once the negative ones are flipped.
__device__ __forceinline__ float warp_largest(float v) {
  const auto flip = [](int32_t bits) { return bits < 0 ? bits ^ 0x7fffffff : bits; };
  return __int_as_float(flip(__reduce_max_sync(~0u, flip(__float_as_int(v)))));
}

// (largest, sum of exponentials relative to it) of a warp.
template <bool kFast>
__device__ __forceinline__ float2 warp_log_sum(float2 v, float scale = 1) {
  const float largest = warp_largest(v.x);
  return {largest, warp_sum(v.y * Exponential<kFast>::ratio(v.x, largest, scale))};
}

}  // namespace
}  // namespace liger
