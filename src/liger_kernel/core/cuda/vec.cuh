// 16-byte vectors of fp32, bf16 or fp16 in registers, and their fp32 values.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include <liger_kernel/core/dtype.h>

namespace liger {

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(BFloat16 v) { return __uint_as_float(uint32_t(v.bits) << 16); }
__device__ __forceinline__ float widen(Float16 v) { return __half2float(__ushort_as_half(v.bits)); }

template <class T>
__device__ __forceinline__ T narrow(float v);
template <>
__device__ __forceinline__ float narrow<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ BFloat16 narrow<BFloat16>(float v) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(v))};
}
template <>
__device__ __forceinline__ Float16 narrow<Float16>(float v) {
  return {__half_as_ushort(__float2half_rn(v))};
}
// v rounded to T and back.
template <class T>
__device__ __forceinline__ float round_to(float v) {
  return widen(narrow<T>(v));
}

// 16 bytes of T.
template <class T>
struct Vec {
  static constexpr int kSize = 16 / sizeof(T);
  uint4 raw;

  __device__ __forceinline__ static Vec load(const T* p) { return {*reinterpret_cast<const uint4*>(p)}; }
  // For data read once: it does not displace what others reuse in L1/L2.
  __device__ __forceinline__ static Vec load_streaming(const T* p) { return {__ldcs(reinterpret_cast<const uint4*>(p))}; }
  // One instruction, p in global memory. Of an assignment nvcc 13 makes four stores where p comes from a count of elements.
  __device__ __forceinline__ void store(T* p) const { __stwb(reinterpret_cast<uint4*>(p), raw); }
  // The assignment, for where it stays whole: other accesses may move across it, which store()'s asm forbids.
  __device__ __forceinline__ void assign(T* p) const { *reinterpret_cast<uint4*>(p) = raw; }
  __device__ __forceinline__ void store_streaming(T* p) const { __stcs(reinterpret_cast<uint4*>(p), raw); }

  __device__ __forceinline__ void to_float(float (&v)[kSize]) const {
    const uint32_t w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        v[i] = __uint_as_float(w[i]);
      } else if constexpr (std::is_same_v<T, BFloat16>) {
        v[2 * i] = __uint_as_float(w[i] << 16);
        v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
      } else {
        const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
        v[2 * i] = f.x;
        v[2 * i + 1] = f.y;
      }
    }
  }
  __device__ __forceinline__ static Vec from_float(const float (&v)[kSize]) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        w[i] = __float_as_uint(v[i]);
      } else if constexpr (std::is_same_v<T, BFloat16>) {
        const __nv_bfloat162 p = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
        w[i] = *reinterpret_cast<const uint32_t*>(&p);
      } else {
        const __half2 p = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
        w[i] = *reinterpret_cast<const uint32_t*>(&p);
      }
    }
    return {{w[0], w[1], w[2], w[3]}};
  }
};

// kCount consecutive values of any alignment as fp32 (weights of another dtype than the activations).
template <int kCount, class T>
__device__ __forceinline__ void load_scalars(const T* p, float (&v)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = widen(p[i]);
}

}  // namespace liger
