// RMSNorm on CUDA; the kernels are those of core/cuda/rms.cuh and rms_wide.cuh.
#include <liger_kernel/core/cuda/rms.cuh>
#include <liger_kernel/core/cuda/rms_wide.cuh>
#include <liger_kernel/ops/rms_norm/rms_norm.h>

namespace liger::rms_norm {

void forward_cuda_registers(const ForwardArgs& a, const Host& host) { launch_rms_forward("rms_norm", a, host); }
void forward_cuda_wide(const ForwardArgs& a, const Host& host) { launch_rms_forward_wide("rms_norm", a, host); }
void backward_cuda_pipelined(const BackwardArgs& a, const Host& host) { launch_rms_backward("rms_norm", a, host); }
void backward_cuda_wide(const BackwardArgs& a, const Host& host) { launch_rms_backward_wide("rms_norm", a, host); }

}  // namespace liger::rms_norm
