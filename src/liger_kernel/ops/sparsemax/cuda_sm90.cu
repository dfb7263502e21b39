// Sparsemax on Hopper with the blocks of a cluster on a row: rows too long for the registers of one block, or too few to fill the machine.
#include <liger_kernel/ops/sparsemax/kernels.cuh>

namespace liger::sparsemax {

void forward_cuda_cluster(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    constexpr int kHeld = most_held(1);
    const HeldRowPlan p = choose_row(vectors_of(a.cols, a.dtype), 1, cluster_of(a, host.machine));
    const auto kernel = p.rest           ? forward_kernel<T, Vec<T>, most_held(1, true), 8, true>
                        : p.cluster == 2 ? forward_kernel<T, Vec<T>, kHeld, 2, false>
                        : p.cluster == 4 ? forward_kernel<T, Vec<T>, kHeld, 4, false>
                                         : forward_kernel<T, Vec<T>, kHeld, 8, false>;
    launch_row(kernel, a, p, host, "sparsemax");
  });
}

void backward_cuda_cluster(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    constexpr int kHeld = most_held(2);
    const HeldRowPlan p = choose_row(vectors_of(a.cols, a.dtype), 2, cluster_of(a, host.machine));
    const auto kernel = p.rest           ? backward_kernel<T, Vec<T>, most_held(2, true), 8, true>
                        : p.cluster == 2 ? backward_kernel<T, Vec<T>, kHeld, 2, false>
                        : p.cluster == 4 ? backward_kernel<T, Vec<T>, kHeld, 4, false>
                                         : backward_kernel<T, Vec<T>, kHeld, 8, false>;
    launch_row(kernel, a, p, host, "sparsemax");
  });
}

}  // namespace liger::sparsemax
