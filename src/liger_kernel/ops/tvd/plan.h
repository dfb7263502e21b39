// Which variants take a problem; how they cover it is in core/pairs.h.
#pragma once
#include <liger_kernel/core/pairs.h>
#include <liger_kernel/ops/tvd/tvd.h>

namespace liger::tvd {

inline const char* reject_vector(const ForwardArgs& a, const Machine&) {
  return reject_pairs(a.rows, a.dtype, a.target_dtype,
                      {a.input_stride, a.target_stride, a.loss ? a.loss_stride : 0, a.grad ? a.grad_stride : 0},
                      {a.input, a.target, a.loss, a.grad});
}
inline const char* reject_vector(const BackwardArgs& a, const Machine&) {
  return reject_pairs(a.rows, a.dtype, a.target_dtype, {a.of_total ? 0 : a.dy_stride, a.input_stride, a.target_stride, a.grad_stride},
                      {a.of_total ? nullptr : a.dy, a.input, a.target, a.grad});
}

}  // namespace liger::tvd
