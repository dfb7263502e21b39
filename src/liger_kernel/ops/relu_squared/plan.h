// Which variants take a problem; how they cover it is in core/gated.h, whose elementwise scheme serves one operand too.
#pragma once
#include <liger_kernel/core/gated.h>
#include <liger_kernel/ops/relu_squared/relu_squared.h>

namespace liger::relu_squared {

inline const char* reject_vector(const ForwardArgs& a, const Machine&) {
  return reject_unaligned(a.rows, a.dtype, {a.x_stride, a.y_stride}, {a.x, a.y});
}
inline const char* reject_vector(const BackwardArgs& a, const Machine&) {
  return reject_unaligned(a.rows, a.dtype, {a.dy_stride, a.x_stride, a.dx_stride}, {a.dy, a.x, a.dx});
}

}  // namespace liger::relu_squared
