// Launches of the kernels of a row map (core/row_map.h), which an op hands over as the Kernels of core/cuda/row_map_kernels.inl:
// forward() and backward() for a type, an access, the vectors held, cluster, rest.
#pragma once
#include <liger_kernel/core/cuda/held_row.cuh>
#include <liger_kernel/core/row_map.h>

namespace liger {
namespace {

// A warp or a block on a row.
template <class Kernels, template <class> class Access>
void launch_row_map(const RowMapForward& a, const Host& host, const char* op) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    using A = Access<T>;
    const HeldRowPlan p = choose_row((a.cols + A::kSize - 1) / A::kSize, 1, 1, host.machine.shared_memory, sizeof(A));
    const auto kernel = p.rest        ? Kernels::template forward<T, A, most_held(1, true), false, true>()
                        : p.held == 1 ? Kernels::template forward<T, A, 1, false, false>()
                        : p.held == 2 ? Kernels::template forward<T, A, 2, false, false>()
                        : p.held == 4 ? Kernels::template forward<T, A, 4, false, false>()
                                      : Kernels::template forward<T, A, 8, false, false>();
    launch_row(kernel, a, p, host, op);
  });
}
template <class Kernels, template <class> class Access>
void launch_row_map(const RowMapBackward& a, const Host& host, const char* op) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    using A = Access<T>;
    const HeldRowPlan p = choose_row((a.cols + A::kSize - 1) / A::kSize, 2, 1, host.machine.shared_memory, sizeof(A));
    const auto kernel = p.rest        ? Kernels::template backward<T, A, most_held(2, true), false, true>()
                        : p.held == 1 ? Kernels::template backward<T, A, 1, false, false>()
                        : p.held == 2 ? Kernels::template backward<T, A, 2, false, false>()
                                      : Kernels::template backward<T, A, 4, false, false>();
    launch_row(kernel, a, p, host, op);
  });
}

// The blocks of a cluster on a row (Hopper).
template <class Kernels>
void launch_row_map_clusters(const RowMapForward& a, const Host& host, const char* op) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const HeldRowPlan p = plan_of(a, cluster_of(a, host.machine), host.machine);
    launch_row(p.rest ? Kernels::template forward<T, Vec<T>, most_held(1, true), true, true>()
                      : Kernels::template forward<T, Vec<T>, most_held(1), true, false>(),
               a, p, host, op);
  });
}
template <class Kernels>
void launch_row_map_clusters(const RowMapBackward& a, const Host& host, const char* op) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const HeldRowPlan p = plan_of(a, cluster_of(a, host.machine), host.machine);
    launch_row(p.rest ? Kernels::template backward<T, Vec<T>, most_held(2, true), true, true>()
                      : Kernels::template backward<T, Vec<T>, most_held(2), true, false>(),
               a, p, host, op);
  });
}

}  // namespace
}  // namespace liger
