// Softmax on Hopper with the blocks of a cluster on a row: rows too long for the registers of one block, or too few to fill the machine.
#include <liger_kernel/ops/softmax/kernels.cuh>

namespace liger::softmax {

void forward_cuda_cluster(const ForwardArgs& a, const Host& host) { launch_row_map_clusters<Kernels>(a, host, "softmax"); }
void backward_cuda_cluster(const BackwardArgs& a, const Host& host) { launch_row_map_clusters<Kernels>(a, host, "softmax"); }

}  // namespace liger::softmax
