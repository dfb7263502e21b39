// KL divergence on CUDA, bound by memory: two reads and, with a gradient, one write. cuda_vector: 16-byte accesses of operands of one
// type; cuda_scalar: single elements of any types and alignment.
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/core/cuda/pairs.cuh>
#include <liger_kernel/ops/kl_div/plan.h>

namespace liger::kl_div {
namespace {

// For 16-bit operands the hardware's logarithm: an absolute error of 2^-21.4, beside terms of size 1.
template <class T>
__device__ __forceinline__ float log_for(float x) {
  return sizeof(T) == 4 ? logf(x) : __logf(x);
}

template <class T, bool kLogTarget>
struct Element {
  float eps = 0, scale = 1;

  __device__ __forceinline__ bool skips(int64_t) const { return false; }
  __device__ __forceinline__ float factor() const { return scale; }
  __device__ __forceinline__ static float probability(float t) { return kLogTarget ? exp_for<T>(t) : t; }
  __device__ __forceinline__ void operator()(float x, float t, float& loss, float& slope) const {
    const float p = probability(t), own = kLogTarget ? t : log_for<T>(fmaxf(t, eps));
    loss = p * (own - x);
    if (p == 0.f && x == x) loss = 0;  // also against -inf
    slope = -p;
  }

  template <class Args>
  __device__ __forceinline__ float slope(const Args& a, int64_t row, int64_t j) const {
    return -probability(read(a.target, a.target_dtype, row * a.target_stride + j));
  }
  template <class Access, class Args>
  __device__ __forceinline__ void slopes(const Args& a, int64_t row, int64_t j, float (&v)[Access::kSize]) const {
    Access::load(a.target, a.target_dtype, row * a.target_stride + j).to_float(v);
#pragma unroll
    for (int k = 0; k < Access::kSize; ++k) v[k] = -probability(v[k]);
  }
};

template <class Access>
void launch(const ForwardArgs& a, const Host& host) {
  using T = typename Access::T;
  if (a.log_target) {
    launch_pairs_forward<Access>(a, Element<T, true>{.eps = a.eps, .scale = a.factor}, host, "kl_div");
  } else {
    launch_pairs_forward<Access>(a, Element<T, false>{.eps = a.eps, .scale = a.factor}, host, "kl_div");
  }
}
template <class Access>
void launch(const BackwardArgs& a, const Host& host) {
  using T = typename Access::T;
  if (a.log_target) {
    launch_pairs_backward<Access>(a, Element<T, true>{.scale = a.factor}, host, "kl_div");
  } else {
    launch_pairs_backward<Access>(a, Element<T, false>{.scale = a.factor}, host, "kl_div");
  }
}

}  // namespace

void forward_cuda_vector(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) { launch<PairVector<T>>(a, host); });
}
void forward_cuda_scalar(const ForwardArgs& a, const Host& host) { launch<PairSingle>(a, host); }
void backward_cuda_vector(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) { launch<PairVector<T>>(a, host); });
}
void backward_cuda_scalar(const BackwardArgs& a, const Host& host) { launch<PairSingle>(a, host); }

}  // namespace liger::kl_div
