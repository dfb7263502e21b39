// simd.inl.h of each ISA behind function pointers, so that one test drives all that this machine runs.
#pragma once
#include <cstdint>

#include <liger_kernel/core/dtype.h>

namespace liger::test {

struct Simd {
  int lanes;
  // n elements of any number: whole vectors, then a partial load and store.
  void (*widen)(DType from, const void* in, float* out, int64_t n);
  void (*narrow)(DType to, const float* in, void* out, int64_t n);
  void (*round)(DType to, const float* in, float* out, int64_t n);  // rounded<T>()
  void (*exp)(const float* in, float* out, int64_t n);
  void (*tanh)(const float* in, float* out, int64_t n);
  void (*sigmoid)(const float* in, float* out, int64_t n);
  // One vector.
  float (*sum)(const float* in);
  float (*max_lane)(const float* in);
  void (*max)(const float* a, const float* b, float* out);
  void (*min)(const float* a, const float* b, float* out);
  void (*load_filled)(DType from, const void* in, float* out, int64_t n, float fill);
  // One value.
  float (*widen_scalar)(DType from, uint16_t bits);
  uint16_t (*narrow_scalar)(DType to, float v);
};

const Simd& simd_cpu();
const Simd& simd_cpu_avx2();
const Simd& simd_cpu_avx512();

}  // namespace liger::test
