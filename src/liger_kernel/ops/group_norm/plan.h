// How the CUDA kernels cover the work. Elementwise passes cover the planes as core/gated.h does. Sums are those of groups or of planes:
// a team of threads takes one.
#pragma once
#include <liger_kernel/core/gated.h>
#include <liger_kernel/ops/group_norm/group_norm.h>

namespace liger::group_norm {

// A warp for up to 16 accesses a lane, else a whole block of kGatedThreads.
inline int team_for(int64_t elements, int width) { return elements <= int64_t{32} * 16 * width ? 32 : kGatedThreads; }

// A plane is a whole number of 16-byte vectors, so that every vector has one weight and one bias.
inline const char* reject_planes(int64_t spatial, DType dtype, std::initializer_list<const void*> pointers) {
  if (spatial * size_of(dtype) % 16 != 0) return "a plane is not a multiple of 16 bytes";
  return reject_unaligned(1, dtype, {}, pointers);
}
inline const char* reject_vector(const ForwardArgs& a, const Machine&) { return reject_planes(a.spatial, a.dtype, {a.x, a.y}); }
inline const char* reject_vector(const BackwardArgs& a, const Machine&) { return reject_planes(a.spatial, a.dtype, {a.dy, a.x, a.dx}); }

}  // namespace liger::group_norm
