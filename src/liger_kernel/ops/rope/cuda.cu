// RoPE on CUDA: one kernel for q and k, forward and backward. One pass: every channel is read once and written once.
//
// A thread owns the two vectors that hold the same pairs (or two vectors of copied channels) in kHeads heads of one token. It
// issues all 2 * kHeads loads, reads the cosines and sines once, and turns its heads with them. Neighbouring threads take
// neighbouring vectors of a head, then the next head, so that a warp touches whole heads in q's native token-major memory.
//
// cuda_vectors: 16-byte vectors; cuda_half_vectors: 8-byte ones (heads of 72 or 36 channels and the like).
//   Indices and strides are 32-bit, their products 64-bit (one multiplication each): tensors may exceed 2^31 elements.
// cuda_scalars: any size, alignment and table type; one element instead of a vector, everything 64-bit.
#include <type_traits>

#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/vec.cuh>
#include <liger_kernel/ops/rope/plan.h>

namespace liger::rope {
namespace {

// kSize elements in registers; what Vec is for 16 bytes.
template <class T, int kSize>
struct alignas(kSize * sizeof(T)) SmallVec {
  T values[kSize];

  __device__ __forceinline__ static SmallVec load(const T* p) { return *reinterpret_cast<const SmallVec*>(p); }
  __device__ __forceinline__ void store_streaming(T* p) const { *reinterpret_cast<SmallVec*>(p) = *this; }
  __device__ __forceinline__ void to_float(float (&v)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; ++i) v[i] = widen(values[i]);
  }
  __device__ __forceinline__ static SmallVec from_float(const float (&v)[kSize]) {
    SmallVec result;
#pragma unroll
    for (int i = 0; i < kSize; ++i) result.values[i] = narrow<T>(v[i]);
    return result;
  }
};
template <class T, int kSize>
using Held = std::conditional_t<kSize == Vec<T>::kSize, Vec<T>, SmallVec<T, kSize>>;

// kSize table values as fp32, in loads of at most 16 bytes.
template <int kSize, class C>
__device__ __forceinline__ void load_table(const C* p, float (&v)[kSize]) {
  constexpr int kPart = kSize < Vec<C>::kSize ? kSize : Vec<C>::kSize;
#pragma unroll
  for (int i = 0; i < kSize; i += kPart) {
    float part[kPart];
    Held<C, kPart>::load(p + i).to_float(part);
#pragma unroll
    for (int j = 0; j < kPart; ++j) v[i + j] = part[j];
  }
}

// (a, b) = elements 0 .. 2 kSize of interleaved pairs -> a: first elements, b: second elements; and the way back.
template <int kSize>
__device__ __forceinline__ void split(float (&a)[kSize], float (&b)[kSize]) {
  float all[2 * kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) all[i] = a[i], all[kSize + i] = b[i];
#pragma unroll
  for (int i = 0; i < kSize; ++i) a[i] = all[2 * i], b[i] = all[2 * i + 1];
}
template <int kSize>
__device__ __forceinline__ void merge(float (&a)[kSize], float (&b)[kSize]) {
  float all[2 * kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) all[2 * i] = a[i], all[2 * i + 1] = b[i];
#pragma unroll
  for (int i = 0; i < kSize; ++i) a[i] = all[i], b[i] = all[kSize + i];
}

// Where lane's two vectors of pairs start.
template <class Index>
struct Place {
  Index first, second;
  __device__ __forceinline__ Place(Order order, Index lane, Index half, int size) {
    first = interleaved(order) ? 2 * lane * size : lane * size;
    second = interleaved(order) ? first + size : order == Order::kHalves ? first + half : first;
  }
};

// In 64 bits; with a 32-bit Index it is one multiplication.
template <class Index>
__device__ __forceinline__ int64_t product(Index i, int64_t stride) {
  return int64_t{i} * static_cast<Index>(stride);
}

// kOrdered: input, output and table may be in pairs, which costs a permutation of registers.
template <class T, class C, int kSize, bool kOrdered, class Index>
__global__ void __launch_bounds__(kThreads) turn(RotateArgs a, Plan plan) {
  using V = Held<T, kSize>;
  // 1. Which token, heads and vectors are this thread's.
  const Index item = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= static_cast<Index>(plan.items)) return;
  const Index lanes = static_cast<Index>(plan.lanes), groups = static_cast<Index>(plan.groups);
  const Index tokens = static_cast<Index>(a.tokens), dim = static_cast<Index>(a.head_dim), rotary = static_cast<Index>(a.rotary_dim);
  const Index q_heads = static_cast<Index>(a.q_heads), heads = q_heads + static_cast<Index>(a.k_heads);
  const Index lane = item % lanes, group = item / lanes % groups, row = item / lanes / groups;
  const Index b = row / tokens, t = row % tokens;

  const bool turns = lane < static_cast<Index>(plan.rotating_lanes);
  Place<Index> from(a.input, lane, rotary / 2, kSize), to(a.output, lane, rotary / 2, kSize);
  if (!turns) {
    from.first = to.first = rotary + 2 * (lane - static_cast<Index>(plan.rotating_lanes)) * kSize;
    from.second = to.second = from.first + kSize;
  }
  const bool has_second = turns || from.second < dim;
  if (!has_second) from.second = from.first;

  // 2. Load them, without a branch between the loads: a head too many reads the last head again.
  V first[kHeads], second[kHeads];
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const Index head = group + j * groups < heads ? group + j * groups : heads - 1;
    const bool is_q = head < q_heads;
    const Strides& s = is_q ? a.q_strides : a.k_strides;
    const T* x =
        static_cast<const T*>(is_q ? a.q : a.k) + b * s.batch + product(t, s.token) + product(is_q ? head : head - q_heads, s.head);
    first[j] = V::load(x + from.first);
    second[j] = V::load(x + from.second);
  }

  // 3. The pairs' cosines and sines. For the inverse, sin is negated and the two change places.
  float cos1[kSize], sin1[kSize], cos2[kSize], sin2[kSize];
  if (turns) {
    const C* cos = static_cast<const C*>(a.cos) + b * a.cos_strides.batch + product(t, a.cos_strides.token);
    const C* sin = static_cast<const C*>(a.sin) + b * a.sin_strides.batch + product(t, a.sin_strides.token);
    const Place<Index> at(a.table, lane, rotary / 2, kSize);
    load_table(cos + at.first, cos1);
    load_table(cos + at.second, cos2);
    const bool complex = kOrdered && a.table == Order::kComplex;
    if (!complex) {
      load_table(sin + at.first, sin1);
      load_table(sin + at.second, sin2);
    }
    if constexpr (kOrdered) {
      if (interleaved(a.table)) split(cos1, cos2);
      if (a.table == Order::kPairs) split(sin1, sin2);
      if (complex) {  // cos1 has the cosines now, cos2 the sines
#pragma unroll
        for (int i = 0; i < kSize; ++i) sin1[i] = sin2[i] = cos2[i], cos2[i] = cos1[i];
      }
    }
    if (a.inverse) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float s = -sin1[i];
        sin1[i] = -sin2[i], sin2[i] = s;
      }
    }
  }

  // 4. Turn and write.
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const Index head = group + j * groups;
    if (head >= heads) break;
    const bool is_q = head < q_heads;
    const Strides& s = is_q ? a.q_out_strides : a.k_out_strides;
    T* y = static_cast<T*>(is_q ? a.q_out : a.k_out) + b * s.batch + product(t, s.token) + product(is_q ? head : head - q_heads, s.head);
    if (turns) {
      float x1[kSize], x2[kSize];
      first[j].to_float(x1);
      second[j].to_float(x2);
      if constexpr (kOrdered) {
        if (a.input == Order::kPairs) split(x1, x2);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float y1 = fmaf(x1[i], cos1[i], -(x2[i] * sin1[i]));
        x2[i] = fmaf(x2[i], cos2[i], x1[i] * sin2[i]);
        x1[i] = y1;
      }
      if constexpr (kOrdered) {
        if (a.output == Order::kPairs) merge(x1, x2);
      }
      first[j] = V::from_float(x1);
      second[j] = V::from_float(x2);
    }
    first[j].store_streaming(y + to.first);
    if (has_second) second[j].store_streaming(y + to.second);
  }
}

template <class T, class C, int kSize, bool kOrdered, class Index>
void launch(const RotateArgs& a, const Host& host) {
  const Plan plan = choose(a, kSize);
  // 2^31 blocks: 5e11 threads, more than any memory feeds.
  const auto blocks = static_cast<unsigned>((plan.items + kThreads - 1) / kThreads);
  turn<T, C, kSize, kOrdered, Index><<<blocks, kThreads, 0, stream_of(host)>>>(a, plan);
  check_launch("rope");
}

template <int kBytes>
void launch_vectors(const RotateArgs& a, const Host& host) {
  const bool ordered = interleaved(a.input) || interleaved(a.output) || interleaved(a.table);
  visit(a.dtype, [&]<class T>(Type<T>) {
    constexpr int kSize = kBytes / sizeof(T);
    const auto with_table = [&]<class C>(Type<C>) {
      if (ordered || kBytes < 16) return launch<T, C, kSize, true, uint32_t>(a, host);
      if constexpr (kBytes == 16) launch<T, C, kSize, false, uint32_t>(a, host);
    };
    if (a.table_dtype == DType::kF32) {
      with_table(Type<float>{});
    } else {
      with_table(Type<T>{});
    }
  });
}

}  // namespace

void rotate_cuda_vectors(const RotateArgs& a, const Host& host) { launch_vectors<16>(a, host); }
void rotate_cuda_half_vectors(const RotateArgs& a, const Host& host) { launch_vectors<8>(a, host); }
void rotate_cuda_scalars(const RotateArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) { visit(a.table_dtype, [&]<class C>(Type<C>) { launch<T, C, 1, true, int64_t>(a, host); }); });
}

}  // namespace liger::rope
