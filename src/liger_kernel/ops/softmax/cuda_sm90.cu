// Softmax on Hopper with the blocks of a cluster on a row: rows too long for the registers of one block, or too few to fill the machine.
#include <liger_kernel/ops/softmax/kernels.cuh>

namespace liger::softmax {

void forward_cuda_cluster(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const HeldRowPlan p = choose_row(vectors_of(a.cols, a.dtype), 1, cluster_of(a, host.machine), host.machine.shared_memory);
    const auto kernel =
        p.rest ? forward_kernel<T, Vec<T>, most_held(1, true), true, true> : forward_kernel<T, Vec<T>, most_held(1), true, false>;
    launch_row(kernel, a, p, host, "softmax");
  });
}

void backward_cuda_cluster(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const HeldRowPlan p = choose_row(vectors_of(a.cols, a.dtype), 2, cluster_of(a, host.machine), host.machine.shared_memory);
    const auto kernel =
        p.rest ? backward_kernel<T, Vec<T>, most_held(2, true), true, true> : backward_kernel<T, Vec<T>, most_held(2), true, false>;
    launch_row(kernel, a, p, host, "softmax");
  });
}

}  // namespace liger::softmax
