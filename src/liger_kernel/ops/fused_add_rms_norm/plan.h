// When the kernels for whole vectors take a call; how they cover it is core/rms.h's.
#pragma once
#include <liger_kernel/ops/fused_add_rms_norm/fused_add_rms_norm.h>

namespace liger::fused_add_rms_norm {

inline RowPlan choose(const ForwardArgs& a) { return plan_rows_forward(a.cols, a.dtype); }
inline RowPlan choose(const BackwardArgs& a, int streams, const Machine& m) {
  return plan_rows_backward(a.rows, a.cols, a.dtype, streams, m);
}

inline const char* reject_registers(const ForwardArgs& a, const Machine&) {
  return reject_rows(a.cols, a.dtype, a.weight_dtype, {a.x_stride, a.residual_stride, a.y_stride, a.s_stride},
                     {a.x, a.residual, a.weight, a.y, a.s});
}
inline const char* reject_pipelined(const BackwardArgs& a, const Machine& m) {
  if (const char* reason = reject_rows(a.cols, a.dtype, a.weight_dtype, {a.dy_stride, a.ds ? a.ds_stride : 0, a.s_stride, a.dx_stride},
                                       {a.dy, a.ds, a.s, a.weight, a.dx})) {
    return reason;
  }
  return choose(a, a.ds && a.dx ? 3 : 2, m).stages < 1 ? "a row of each input does not fit in shared memory" : nullptr;
}

}  // namespace liger::fused_add_rms_norm
