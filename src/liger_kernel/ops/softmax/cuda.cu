// Softmax on CUDA with a warp or a block on a row. cuda_vector: 16-byte accesses, also where rows begin between their boundaries as
// long as those of all operands do alike; cuda_scalar: single elements, for everything else.
#include <liger_kernel/ops/softmax/kernels.cuh>

namespace liger::softmax {
namespace {

template <template <class> class Access>
void launch(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    using A = Access<T>;
    const HeldRowPlan p = choose_row((a.cols + A::kSize - 1) / A::kSize, 1, 1, host.machine.shared_memory, sizeof(A));
    const auto kernel = p.rest        ? forward_kernel<T, A, most_held(1, true), false, true>
                        : p.held == 1 ? forward_kernel<T, A, 1, false, false>
                        : p.held == 2 ? forward_kernel<T, A, 2, false, false>
                        : p.held == 4 ? forward_kernel<T, A, 4, false, false>
                                      : forward_kernel<T, A, 8, false, false>;
    launch_row(kernel, a, p, host, "softmax");
  });
}

template <template <class> class Access>
void launch(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    using A = Access<T>;
    const HeldRowPlan p = choose_row((a.cols + A::kSize - 1) / A::kSize, 2, 1, host.machine.shared_memory, sizeof(A));
    const auto kernel = p.rest        ? backward_kernel<T, A, most_held(2, true), false, true>
                        : p.held == 1 ? backward_kernel<T, A, 1, false, false>
                        : p.held == 2 ? backward_kernel<T, A, 2, false, false>
                                      : backward_kernel<T, A, 4, false, false>;
    launch_row(kernel, a, p, host, "softmax");
  });
}

}  // namespace

void forward_cuda_vector(const ForwardArgs& a, const Host& host) { launch<Vec>(a, host); }
void forward_cuda_scalar(const ForwardArgs& a, const Host& host) { launch<Single>(a, host); }
void backward_cuda_vector(const BackwardArgs& a, const Host& host) { launch<Vec>(a, host); }
void backward_cuda_scalar(const BackwardArgs& a, const Host& host) { launch<Single>(a, host); }

}  // namespace liger::softmax
