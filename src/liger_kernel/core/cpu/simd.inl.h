// fp32 vectors on the GCC/Clang vector extensions. The width follows the flags of the translation unit: SSE2 or NEON 4 lanes,
// AVX2 8, AVX-512 16. Everything has internal linkage: a helper shared by units of different ISAs could be linked from the
// wrong one.
//
// Narrow types are widened on load and rounded to nearest even on store. The intrinsics are here because GCC 12 splits or
// scalarises __builtin_convertvector for these widths (1.4-3x slower, measured).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <liger_kernel/core/dtype.h>

// The name a stamped function has in this translation unit: LIGER_STAMP(forward) is forward_cpu_avx2.
#if defined(__AVX512F__)
#define LIGER_STAMP(name) name##_cpu_avx512
#elif defined(__AVX2__)
#define LIGER_STAMP(name) name##_cpu_avx2
#else
#define LIGER_STAMP(name) name##_cpu
#endif

namespace liger {
namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kLanes = kBytes / 4;
typedef float F __attribute__((vector_size(kBytes)));
typedef int32_t I __attribute__((vector_size(kBytes)));
typedef uint32_t U __attribute__((vector_size(kBytes)));
typedef uint16_t H __attribute__((vector_size(kBytes / 2)));

[[maybe_unused]] constexpr float kInf = std::numeric_limits<float>::infinity();

inline F set(float v) { return F{} + v; }
inline F bits_as_f(U v) { return (F)v; }

// --- scalars -------------------------------------------------------------------------------------------------------------
inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float widen(float v) { return v; }
inline float widen(BFloat16 v) { return bits_to_float(uint32_t(v.bits) << 16); }
inline float widen(Float16 v) {
  const uint32_t sign = uint32_t(v.bits & 0x8000) << 16;
  const uint32_t magnitude = v.bits & 0x7fff;
  // Shifting the exponent by multiplication handles subnormals; infinities and NaNs keep all exponent bits.
  float f = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);  // 2^112
  if (magnitude >= 0x7c00) f = bits_to_float(float_to_bits(f) | 0x7f800000u);
  return bits_to_float(float_to_bits(f) | sign);
}

template <class T>
inline T narrow(float v);
template <>
inline float narrow<float>(float v) {
  return v;
}
template <>
inline BFloat16 narrow<BFloat16>(float v) {
  const uint32_t u = float_to_bits(v);
  if (v != v) return {static_cast<uint16_t>((u >> 16) | 0x40)};
  return {static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
template <>
inline Float16 narrow<Float16>(float v) {
  const uint32_t u = float_to_bits(v), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00)};  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {                                                // subnormal: let the adder round at the last place of 2^-24
    const float rounded = bits_to_float(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_to_bits(rounded) - float_to_bits(0.5f)))};
  }
  const uint32_t rebased = magnitude - 0x38000000u;
  return {static_cast<uint16_t>(sign | ((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13))};
}
// v rounded to T and back.
template <class T>
inline float round_to(float v) {
  return widen(narrow<T>(v));
}

// --- loads and stores ------------------------------------------------------------------------------------------------------
inline F load(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline F load(const BFloat16* p) {
#if defined(__AVX512F__)
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
  return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  H h;
  std::memcpy(&h, p, sizeof h);
  return (F)(__builtin_convertvector(h, U) << 16);
#endif
}
inline F load(const Float16* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
  return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  F v;
  for (int i = 0; i < kLanes; i++) v[i] = widen(p[i]);
  return v;
#endif
}

// A NaN keeps its quiet bit: adding the rounding constant could carry it into infinity.
inline H to_bf16(F v) {
#if defined(__AVX512BF16__)
  return (H)_mm512_cvtneps_pbh((__m512)v);
#else
  const U u = (U)v, quiet = (u >> 16) | 0x40u;
  const U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U is_nan = (U)(v != v);
  const U r = (rounded & ~is_nan) | (quiet & is_nan);
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i p = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)r, (__m256i)r), 0x08);
  return (H)_mm256_castsi256_si128(p);
#else
  return __builtin_convertvector(r, H);
#endif
#endif
}
inline H to_fp16(F v) {
#if defined(__AVX512F__)
  return (H)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (H)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  H h;
  for (int i = 0; i < kLanes; i++) h[i] = narrow<Float16>(v[i]).bits;
  return h;
#endif
}
inline void store(F v, float* p) { std::memcpy(p, &v, sizeof v); }
inline void store(F v, BFloat16* p) {
  const H h = to_bf16(v);
  std::memcpy(p, &h, sizeof h);
}
inline void store(F v, Float16* p) {
  const H h = to_fp16(v);
  std::memcpy(p, &h, sizeof h);
}

// The first n < kLanes elements; the other lanes read `fill` and are not written.
template <class T>
inline F load(const T* p, int64_t n, float fill = 0) {
  T buffer[kLanes];
  for (int i = 0; i < kLanes; i++) buffer[i] = narrow<T>(fill);
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store(F v, T* p, int64_t n) {
  T buffer[kLanes];
  store(v, buffer);
  std::memcpy(p, buffer, n * sizeof(T));
}

// v rounded to T's precision, still fp32.
template <class T>
inline F rounded(F v);
template <>
inline F rounded<float>(F v) {
  return v;
}
template <>
inline F rounded<BFloat16>(F v) {
  BFloat16 buffer[kLanes];
  store(v, buffer);
  return load(buffer);
}
template <>
inline F rounded<Float16>(F v) {
  Float16 buffer[kLanes];
  store(v, buffer);
  return load(buffer);
}

// --- lane-wise -------------------------------------------------------------------------------------------------------------
// select: where the mask (all ones or zeros per lane) is set, a, else b. max/min return b when a lane of a is NaN, and a NaN
// in b wins, as the x86 instructions do.
inline F select(I mask, F a, F b) { return (F)(((I)a & mask) | ((I)b & ~mask)); }
#if defined(__AVX512F__)
inline F max(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
inline F min(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
inline bool any(I mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }
#elif defined(__AVX2__)
inline F max(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
inline F min(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
inline bool any(I mask) { return _mm256_movemask_ps((__m256)mask) != 0; }
#else
inline F max(F a, F b) { return select(a > b, a, b); }
inline F min(F a, F b) { return select(a < b, a, b); }
inline bool any(I mask) {
  int32_t r = 0;
  for (int i = 0; i < kLanes; i++) r |= mask[i];
  return r != 0;
}
#endif
inline F abs(F v) { return (F)((U)v & 0x7fffffffu); }

inline float sum(F v) {
  for (int step = kLanes / 2; step; step /= 2) {
    for (int i = 0; i < step; i++) v[i] += v[i + step];
  }
  return v[0];
}
inline float max_lane(F v) {
  float m = v[0];
  for (int i = 1; i < kLanes; i++) m = v[i] > m || v[i] != v[i] ? v[i] : m;
  return m;
}

// e^x, <= 1 ULP for x in [-87.3, 88.7]; 0 below, infinity above, NaN for NaN. Range reduction by ln 2 in two parts, then the
// degree-6 polynomial on [-ln2/2, ln2/2]; 2^n is applied in two halves so that n = 128 does not overflow early.
inline F exp(F x) {
  const F clamped = min(max(x, set(-87.4f)), set(88.8f));  // NaN handled at the end
  const F magic = set(12582912.f);                         // 1.5 * 2^23: rounds to an integer kept in the low bits
  const F t = clamped * 1.44269504f + magic, n = t - magic;
  const F r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
  const F p =
      (((((r * 1.98527617e-4f + 1.39304355e-3f) * r + 8.33336077e-3f) * r + 4.16664853e-2f) * r + 0.166666672f) * r + 0.5f) * (r * r) + r +
      1.f;
  const I k = (I)t - (I)magic;
  const I half = k >> 1;
  F y = p * (F)((half + 127) << 23) * (F)((k - half + 127) << 23);
  y = select(x < set(-87.33f), F{}, y);
  return select(x != x, x, y);
}
inline F sigmoid(F x) { return set(1.f) / (set(1.f) + exp(-x)); }

// tanh: odd polynomial near zero where 1 - 2/(1 + e^2x) cancels, the quotient elsewhere; <= 3 ULP.
inline F tanh(F x) {
  const F a = abs(x);
  const F s = x * x;
  const F small = x + x * s * (-0.333332807f + s * (0.133314416f + s * (-0.0537396856f + s * (0.0206389986f + s * -5.70489699e-3f))));
  const F e = exp(min(a + a, set(30.f)));
  const F large = set(1.f) - set(2.f) / (e + 1.f);
  const F signed_large = (F)((U)large | ((U)x & 0x80000000u));
  return select(x != x, x, select(a < set(0.625f), small, signed_large));
}

}  // namespace
}  // namespace liger
