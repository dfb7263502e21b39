// A row as raw 16-byte vectors: exponentials, the target taken out, columns beside the vectors.
#pragma once
#include <liger_kernel/core/cuda/packed.cuh>

namespace liger::cross_entropy {
namespace {

// x of element k, which becomes -inf. By masks: an index known at run time, or a select that amounts to one, would put the vector in
// local memory.
template <class T>
__device__ __forceinline__ float take(Vec<T>& v, int k) {
  uint32_t w[4] = {v.raw.x, v.raw.y, v.raw.z, v.raw.w}, chosen = 0;
  const uint32_t mask = Word<T>::kValues == 1 ? ~0u : k % 2 ? 0xffff0000u : 0xffffu;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t here = i == k / Word<T>::kValues ? mask : 0u;
    chosen |= w[i] & here;
    w[i] = (w[i] & ~here) | (Word<T>::kLowest & here);
  }
  v.raw = make_uint4(w[0], w[1], w[2], w[3]);
  if constexpr (Word<T>::kValues == 1) {
    return __uint_as_float(chosen);
  } else {
    return widen(T{static_cast<uint16_t>(k % 2 ? chosen >> 16 : chosen)});
  }
}

__device__ __forceinline__ float ratio_fast(float from, float to) { return from == to ? 1.f : exp2_fast((from - to) * kExpToExp2); }

// exp(x - largest), largest taken as 0 while it is -inf. One multiply-add for 16-bit types, whose own error hides that of the
// product largest * log2(e); fp32 subtracts first.
template <class T>
struct RowExponential {
  __device__ explicit RowExponential(float largest) {
    const float m = largest == -INFINITY ? 0.f : largest;
    base = sizeof(T) == 4 ? m : -m * kExpToExp2;
  }
  __device__ __forceinline__ float operator()(float x) const {
    return exp2_fast(sizeof(T) == 4 ? (x - base) * kExpToExp2 : fmaf(x, kExpToExp2, base));
  }
  __device__ __forceinline__ float sum(const Vec<T>& v) const {
    float x[Vec<T>::kSize], s0 = 0, s1 = 0;
    v.to_float(x);
#pragma unroll
    for (int i = 0; i < Vec<T>::kSize; i += 2) s0 += (*this)(x[i]), s1 += (*this)(x[i + 1]);
    return s0 + s1;
  }
  float base;
};

template <class T>
__device__ __forceinline__ float sum_values(const Vec<T>& x) {
  float values[Vec<T>::kSize], total = 0;
  x.to_float(values);
#pragma unroll
  for (int k = 0; k < Vec<T>::kSize; ++k) total += values[k];
  return total;
}

// A row's columns: `head` single ones up to a 16-byte boundary, `vectors` vectors, `tail` single ones.
template <class T, bool kAligned>
struct RowColumns {
  static constexpr int kSize = Vec<T>::kSize;
  __device__ __forceinline__ RowColumns(const T* row, int64_t vocab)
      : head(kAligned ? 0 : static_cast<int>((16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T))),
        vectors(static_cast<int>((vocab - head) / kSize)),
        tail(kAligned ? 0 : static_cast<int>((vocab - head) % kSize)),
        end(static_cast<int>(vocab)) {}

  // The single column of this thread, -1 for none: the first block of a cluster has the head, the last one the tail.
  __device__ __forceinline__ int single(bool first_block, bool last_block) const {
    const int thread = static_cast<int>(threadIdx.x);
    if (kAligned || thread >= 2 * kSize) return -1;
    if (thread < kSize) return first_block && thread < head ? thread : -1;
    return last_block && thread - kSize < tail ? end - tail + thread - kSize : -1;
  }

  int head, vectors, tail, end;
};

}  // namespace
}  // namespace liger::cross_entropy
