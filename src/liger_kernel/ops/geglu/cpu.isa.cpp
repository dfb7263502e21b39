// GeGLU on the CPU, compiled once per ISA; the loops are core/cpu/gated.inl.h's.
#include <liger_kernel/core/cpu/gated.inl.h>
#include <liger_kernel/ops/geglu/geglu.h>

#include <liger_kernel/ops/geglu/gelu.inl.h>

namespace liger::geglu {
namespace {

// f(Type<T>, activation of operands of type T)
template <class Args, class Body>
void visit_activation(const Args& a, Body&& f) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    if (a.exact) {
      f(Type<T>{}, GeluErf<T>{});
    } else {
      f(Type<T>{}, GeluTanh<T>{});
    }
  });
}

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  visit_activation(a, [&]<class T>(Type<T>, const auto& gelu) { gated_forward<T>(a, gelu, 1, host); });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  visit_activation(a, [&]<class T>(Type<T>, const auto& gelu) { gated_backward<T>(a, gelu, 1, host); });
}

}  // namespace liger::geglu
