// SwiGLU on CUDA; the kernels are core/cuda/gated.cuh's. cuda_vector: 16-byte accesses; cuda_scalar: any alignment.
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/ops/swiglu/swiglu.h>

#include <liger_kernel/ops/swiglu/silu.inl.h>

namespace liger::swiglu {

void forward_cuda_vector(const ForwardArgs& a, const Host& host) {
  visit(a.dtype,
        [&]<class T>(Type<T>) { launch_gated_forward<T, Vec<T>>("swiglu", a, Silu<T>{a.gate_multiplier}, a.down_multiplier, host); });
}
void forward_cuda_scalar(const ForwardArgs& a, const Host& host) {
  visit(a.dtype,
        [&]<class T>(Type<T>) { launch_gated_forward<T, Single<T>>("swiglu", a, Silu<T>{a.gate_multiplier}, a.down_multiplier, host); });
}
void backward_cuda_vector(const BackwardArgs& a, const Host& host) {
  visit(a.dtype,
        [&]<class T>(Type<T>) { launch_gated_backward<T, Vec<T>>("swiglu", a, Silu<T>{a.gate_multiplier}, a.down_multiplier, host); });
}
void backward_cuda_scalar(const BackwardArgs& a, const Host& host) {
  visit(a.dtype,
        [&]<class T>(Type<T>) { launch_gated_backward<T, Single<T>>("swiglu", a, Silu<T>{a.gate_multiplier}, a.down_multiplier, host); });
}

}  // namespace liger::swiglu
