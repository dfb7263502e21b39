// The Kernels of core/cuda/row_map.cuh, in an op's namespace after its forward_kernel and backward_kernel.
struct Kernels {
  template <class T, class Access, int kHeld, bool kCluster, bool kRest>
  static auto forward() {
    return forward_kernel<T, Access, kHeld, kCluster, kRest>;
  }
  template <class T, class Access, int kHeld, bool kCluster, bool kRest>
  static auto backward() {
    return backward_kernel<T, Access, kHeld, kCluster, kRest>;
  }
};
