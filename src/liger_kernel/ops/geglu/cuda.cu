// GeGLU on CUDA; the kernels are core/cuda/gated.cuh's. cuda_vector: 16-byte accesses; cuda_scalar: any alignment.
#include <liger_kernel/core/cuda/gated.cuh>
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

void forward_cuda_vector(const ForwardArgs& a, const Host& host) {
  visit_activation(a, [&]<class T>(Type<T>, const auto& gelu) { launch_gated_forward<T, Vec<T>>("geglu", a, gelu, 1, host); });
}
void forward_cuda_scalar(const ForwardArgs& a, const Host& host) {
  visit_activation(a, [&]<class T>(Type<T>, const auto& gelu) { launch_gated_forward<T, Single<T>>("geglu", a, gelu, 1, host); });
}
void backward_cuda_vector(const BackwardArgs& a, const Host& host) {
  visit_activation(a, [&]<class T>(Type<T>, const auto& gelu) { launch_gated_backward<T, Vec<T>>("geglu", a, gelu, 1, host); });
}
void backward_cuda_scalar(const BackwardArgs& a, const Host& host) {
  visit_activation(a, [&]<class T>(Type<T>, const auto& gelu) { launch_gated_backward<T, Single<T>>("geglu", a, gelu, 1, host); });
}

}  // namespace liger::geglu
