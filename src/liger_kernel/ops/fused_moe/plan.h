// Which variants take a problem.
#pragma once
#include <liger_kernel/core/gated.h>
#include <liger_kernel/ops/fused_moe/fused_moe.h>

namespace liger::fused_moe {

inline const char* reject_vector(const CombineArgs& a, const Machine&) {
  if (a.cols * size_of(a.dtype) % 16) return "rows are not whole 16-byte vectors";
  return reject_unaligned(1, a.dtype, {}, {a.y, a.out});
}
inline const char* reject_vector(const GateGradientArgs& a, const Machine&) {
  if (a.cols * size_of(a.dtype) % 16) return "rows are not whole 16-byte vectors";
  return reject_unaligned(1, a.dtype, {}, {a.da, a.h, a.dh, a.weighted});
}

}  // namespace liger::fused_moe
