// Which variants take a problem; how they cover it is in core/gated.h.
#pragma once
#include <liger_kernel/core/gated.h>
#include <liger_kernel/ops/swiglu/swiglu.h>

namespace liger::swiglu {

inline const char* reject_vector(const ForwardArgs& a, const Machine&) {
  return reject_unaligned(a.rows, a.dtype, {a.a_stride, a.b_stride, a.c_stride}, {a.a, a.b, a.c});
}
inline const char* reject_vector(const BackwardArgs& a, const Machine&) {
  return reject_unaligned(a.rows, a.dtype, {a.dc_stride, a.a_stride, a.b_stride, a.da_stride, a.db_stride}, {a.dc, a.a, a.b, a.da, a.db});
}

}  // namespace liger::swiglu
