// SwiGLU on the CPU, compiled once per ISA; the loops are core/cpu/gated.inl.h's.
#include <liger_kernel/core/cpu/gated.inl.h>
#include <liger_kernel/ops/swiglu/swiglu.h>

#include <liger_kernel/ops/swiglu/silu.inl.h>

namespace liger::swiglu {

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) { gated_forward<T>(a, Silu<T>{a.gate_multiplier}, a.down_multiplier, host); });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) { gated_backward<T>(a, Silu<T>{a.gate_multiplier}, a.down_multiplier, host); });
}

}  // namespace liger::swiglu
