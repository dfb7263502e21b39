// Sparsemax on CUDA with a warp or a block on a row. cuda_vector: 16-byte accesses, also where rows begin between their boundaries as
// long as those of all operands do alike; cuda_scalar: single elements, for everything else.
#include <liger_kernel/ops/sparsemax/kernels.cuh>

namespace liger::sparsemax {
void forward_cuda_vector(const ForwardArgs& a, const Host& host) { launch_row_map<Kernels, Vec>(a, host, "sparsemax"); }
void forward_cuda_scalar(const ForwardArgs& a, const Host& host) { launch_row_map<Kernels, Single>(a, host, "sparsemax"); }
void backward_cuda_vector(const BackwardArgs& a, const Host& host) { launch_row_map<Kernels, Vec>(a, host, "sparsemax"); }
void backward_cuda_scalar(const BackwardArgs& a, const Host& host) { launch_row_map<Kernels, Single>(a, host, "sparsemax"); }

}  // namespace liger::sparsemax
