// Softmax on CUDA with a warp or a block on a row. cuda_vector: 16-byte accesses, also where rows begin between their boundaries as
// long as those of all operands do alike; cuda_scalar: single elements, for everything else.
#include <liger_kernel/ops/softmax/kernels.cuh>

namespace liger::softmax {
void forward_cuda_vector(const ForwardArgs& a, const Host& host) { launch_row_map<Kernels, Vec>(a, host, "softmax"); }
void forward_cuda_scalar(const ForwardArgs& a, const Host& host) { launch_row_map<Kernels, Single>(a, host, "softmax"); }
void backward_cuda_vector(const BackwardArgs& a, const Host& host) { launch_row_map<Kernels, Vec>(a, host, "softmax"); }
void backward_cuda_scalar(const BackwardArgs& a, const Host& host) { launch_row_map<Kernels, Single>(a, host, "softmax"); }

}  // namespace liger::softmax
