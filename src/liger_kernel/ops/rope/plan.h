// How the CUDA kernel covers the work: a thread owns two vectors (`vector` elements each) of a head, `kHeads` times over.
#pragma once
#include <liger_kernel/ops/rope/rope.h>

namespace liger::rope {

constexpr int kThreads = 256;
// Heads of one token that a thread turns with the same cosines and sines: 2 * kHeads loads are in flight.
constexpr int kHeads = 4;

struct Plan {
  int vector;              // elements
  int64_t rotating_lanes;  // threads of a head that turn pairs: r/2 / vector
  int64_t lanes;           // plus those that copy the other channels
  int64_t groups;          // threads per token and lane: q and k heads / kHeads, rounded up
  int64_t items;           // threads in all
};

inline Plan choose(const RotateArgs& a, int vector) {
  Plan p{.vector = vector, .rotating_lanes = a.rotary_dim / 2 / vector, .lanes = 0, .groups = 0, .items = 0};
  const int64_t copied = (a.head_dim - a.rotary_dim + vector - 1) / vector;
  p.lanes = p.rotating_lanes + (copied + 1) / 2;
  p.groups = (a.q_heads + a.k_heads + kHeads - 1) / kHeads;
  p.items = a.batch * a.tokens * p.groups * p.lanes;
  return p;
}

inline std::string describe(const Plan& p, DType dtype) {
  return std::to_string(p.lanes) + " threads a head, two vectors of " + std::to_string(p.vector * size_of(dtype)) + " bytes each; " +
         std::to_string(kHeads) + " heads a thread; " + std::to_string((p.items + kThreads - 1) / kThreads) + " blocks of " +
         std::to_string(kThreads);
}

// nullptr when vectors of `bytes` fit and 32-bit indices do.
inline const char* reject_width(const RotateArgs& a, int64_t bytes) {
  constexpr int64_t kMaxStride = 0x7fffffff, kMaxItems = int64_t{1} << 30;
  const int64_t vector = bytes / size_of(a.dtype);
  if (a.table_dtype != a.dtype && a.table_dtype != DType::kF32) return "cos and sin have neither q's type nor fp32";
  if (a.rotary_dim % (2 * vector) != 0 || a.head_dim % vector != 0) return "half of the rotated channels is not a multiple of the vector";

  const char* misaligned = "a head is not aligned to the vector";
  const char* wide = "a stride or the number of threads exceeds 32 bits";
  // The stride of a dimension of size 1 is never used.
  const auto check = [&](const void* p, int64_t stride, int64_t size, int64_t element, int64_t alignment) -> const char* {
    if (reinterpret_cast<uintptr_t>(p) % alignment != 0) return misaligned;
    if (size > 1 && stride * element % alignment != 0) return misaligned;
    return nullptr;
  };
  const auto check_side = [&](const void* p, const Strides& s, int64_t heads) -> const char* {
    if (heads == 0) return nullptr;
    if (s.head > kMaxStride || s.token > kMaxStride) return wide;
    const int64_t element = size_of(a.dtype);
    if (check(p, s.batch, a.batch, element, bytes) || check(p, s.head, heads, element, bytes)) return misaligned;
    return check(p, s.token, a.tokens, element, bytes);
  };
  if (const char* reason = check_side(a.q, a.q_strides, a.q_heads)) return reason;
  if (const char* reason = check_side(a.k, a.k_strides, a.k_heads)) return reason;
  if (const char* reason = check_side(a.q_out, a.q_out_strides, a.q_heads)) return reason;
  if (const char* reason = check_side(a.k_out, a.k_out_strides, a.k_heads)) return reason;

  const int64_t element = size_of(a.table_dtype), alignment = vector * element < 16 ? vector * element : 16;
  for (const auto& [p, s] : {std::pair{a.cos, a.cos_strides}, std::pair{a.sin, a.sin_strides}}) {
    if (s.token > kMaxStride) return wide;
    if (check(p, s.batch, a.batch, element, alignment) || check(p, s.token, a.tokens, element, alignment)) {
      return "a row of cos or sin is not aligned to the vector";
    }
  }
  return choose(a, static_cast<int>(vector)).items > kMaxItems ? wide : nullptr;
}
inline const char* reject_vectors(const RotateArgs& a, const Machine&) { return reject_width(a, 16); }
inline const char* reject_half_vectors(const RotateArgs& a, const Machine&) { return reject_width(a, 8); }

}  // namespace liger::rope
