// What the two forms of the RMSNorm kernels share: which row of the arguments is normalised, and the roundings.
#pragma once
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/vec.cuh>
#include <liger_kernel/core/rms.h>

namespace liger {
namespace {

// The row that is normalised: the sum where there is a residual.
template <class Args>
constexpr bool kAdds = requires(Args a) {
  a.s;
};
template <class Args>
__host__ __device__ auto normalised(const Args& a) {
  if constexpr (kAdds<Args>) {
    return a.s;
  } else {
    return a.x;
  }
}
template <class Args>
__host__ __device__ int64_t normalised_stride(const Args& a) {
  if constexpr (kAdds<Args>) {
    return a.s_stride;
  } else {
    return a.x_stride;
  }
}
// Rows of upstream gradient that are added to dx, or nullptr.
template <class Args>
__host__ __device__ const void* residual_gradient(const Args& a) {
  if constexpr (kAdds<Args>) {
    return a.ds;
  } else {
    return nullptr;
  }
}

// rstd from the mean square. In "each step" mode the mean, eps and rstd are values of x's type.
template <class T>
__device__ __forceinline__ float rstd_of(float mean, float eps, Rounding rounding) {
  if (rounding == Rounding::kEachStep) return round_to<T>(reciprocal_root(round_to<T>(mean) + round_to<T>(eps)));
  return reciprocal_root(mean + eps);
}

template <class T, Rounding kRounding>
__device__ __forceinline__ float normalise(float x, float rstd, float w) {
  const float hat = x * rstd;
  if constexpr (kRounding == Rounding::kLast) return hat * w;
  return round_to<T>(hat) * (kRounding == Rounding::kEachStep ? round_to<T>(w) : w);
}
// f.operator()<rounding>(): outside the loops, so that they hold no branch.
template <class F>
__device__ __forceinline__ void visit_rounding(Rounding rounding, F&& f) {
  if (rounding == Rounding::kBeforeWeight) {
    f.template operator()<Rounding::kBeforeWeight>();
  } else if (rounding == Rounding::kLast) {
    f.template operator()<Rounding::kLast>();
  } else {
    f.template operator()<Rounding::kEachStep>();
  }
}

}  // namespace
}  // namespace liger
