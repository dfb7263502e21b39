// When the kernels for whole vectors take a call; how they cover it is core/rms.h's.
#pragma once
#include <liger_kernel/ops/rms_norm/rms_norm.h>

namespace liger::rms_norm {

inline RowPlan choose(const ForwardArgs& a) { return plan_rows_forward(a.cols, a.dtype); }
inline RowPlan choose(const BackwardArgs& a, const Machine& m) { return plan_rows_backward(a.rows, a.cols, a.dtype, 2, m); }

inline const char* reject_registers(const ForwardArgs& a, const Machine&) {
  return reject_rows(a.cols, a.dtype, a.weight_dtype, {a.x_stride, a.y_stride}, {a.x, a.y, a.weight});
}
inline const char* reject_pipelined(const BackwardArgs& a, const Machine& m) {
  if (const char* reason =
          reject_rows(a.cols, a.dtype, a.weight_dtype, {a.x_stride, a.dy_stride, a.dx_stride}, {a.x, a.dy, a.dx, a.weight})) {
    return reason;
  }
  return choose(a, m).stages < 1 ? "a row of each input does not fit in shared memory" : nullptr;
}

}  // namespace liger::rms_norm
