// One element whose type is known only at run time: weights and biases beside the rows, and their gradients.
#pragma once
#include <liger_kernel/core/cuda/vec.cuh>

namespace liger {

__device__ __forceinline__ float read(const void* p, DType dtype, int64_t i) {
  return dtype == DType::kF32    ? static_cast<const float*>(p)[i]
         : dtype == DType::kBF16 ? widen(static_cast<const BFloat16*>(p)[i])
                                 : widen(static_cast<const Float16*>(p)[i]);
}
__device__ __forceinline__ void write(float v, void* p, DType dtype, int64_t i) {
  if (dtype == DType::kF32) static_cast<float*>(p)[i] = v;
  if (dtype == DType::kBF16) static_cast<BFloat16*>(p)[i] = narrow<BFloat16>(v);
  if (dtype == DType::kF16) static_cast<Float16*>(p)[i] = narrow<Float16>(v);
}

}  // namespace liger
