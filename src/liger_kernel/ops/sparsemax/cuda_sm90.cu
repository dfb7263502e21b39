// Sparsemax on Hopper with the blocks of a cluster on a row: rows too long for the registers of one block, or too few to fill the machine.
#include <liger_kernel/ops/sparsemax/kernels.cuh>

namespace liger::sparsemax {

void forward_cuda_cluster(const ForwardArgs& a, const Host& host) { launch_row_map_clusters<Kernels>(a, host, "sparsemax"); }
void backward_cuda_cluster(const BackwardArgs& a, const Host& host) { launch_row_map_clusters<Kernels>(a, host, "sparsemax"); }

}  // namespace liger::sparsemax
