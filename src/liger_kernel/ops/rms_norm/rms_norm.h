// RMSNorm over the last dimension (Zhang & Sennrich 2019):
//
//   rstd = 1 / sqrt(mean(x^2) + eps)         y = x * rstd * (weight + weight_offset)
//   dx   = rstd * (g - x * rstd^2 * mean(g * x)),  g = dy * (weight + weight_offset)
//   dw   = sum over rows of dy * x * rstd
//
// `rounding` says where x's type is rounded to; in bf16 the results differ (see Rounding). Sums are fp32 in every mode.
#pragma once
#include <string>

#include <liger_kernel/core/rms.h>
#include <liger_kernel/core/variant.h>

namespace liger::rms_norm {

struct ForwardArgs {
  const void* x;       // [rows, cols]
  const void* weight;  // [cols]; nullptr: no weight, the offset is unused
  void* y;             // [rows, cols], x's type
  float* rstd;         // [rows]
  int64_t rows, cols;
  int64_t x_stride, y_stride;  // elements from row to row
  DType dtype, weight_dtype;
  float eps;
  float weight_offset = 0;
  Rounding rounding = Rounding::kBeforeWeight;
};

struct BackwardArgs {
  const void* dy;      // [rows, cols], x's type
  const void* x;       // [rows, cols]
  const void* weight;  // [cols]; nullptr: no weight
  const float* rstd;   // [rows]
  void* dx;            // [rows, cols]; nullptr: not wanted
  void* dw;            // [cols] of dw_dtype, summed in fp32; nullptr: not wanted
  int64_t rows, cols;
  int64_t dy_stride, x_stride, dx_stride;
  DType dtype, weight_dtype;
  DType dw_dtype = DType::kF32;
  float weight_offset = 0;
  Rounding rounding = Rounding::kBeforeWeight;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/rms_norm/variants.inc>

}  // namespace liger::rms_norm
