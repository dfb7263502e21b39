// Residual addition and RMSNorm over the last dimension (Zhang & Sennrich 2019) in one pass over memory each way:
//
//   s  = x + residual, rounded to x's type: both returned and normalised
//   y  = s * rstd * (weight + weight_offset)         rstd = 1 / sqrt(mean(s^2) + eps)
//   dx = dresidual = rstd * (g - s * rstd^2 * mean(g * s)) + ds,  g = dy * (weight + weight_offset)
//   dw = sum over rows of dy * s * rstd
//
// `rounding` says what else is rounded to x's type; in bf16 the results differ (see Rounding). Sums are fp32 in every mode.
#pragma once
#include <string>

#include <liger_kernel/core/rms.h>
#include <liger_kernel/core/variant.h>

namespace liger::fused_add_rms_norm {

struct ForwardArgs {
  const void* x;         // [rows, cols]
  const void* residual;  // [rows, cols], x's type
  const void* weight;    // [cols]; nullptr: no weight, the offset is unused
  void* y;               // [rows, cols], x's type
  void* s;               // [rows, cols], x's type
  float* rstd;           // [rows]
  int64_t rows, cols;
  int64_t x_stride, residual_stride, y_stride, s_stride;  // elements from row to row
  DType dtype, weight_dtype;
  float eps;
  float weight_offset = 0;
  Rounding rounding = Rounding::kBeforeWeight;
};

struct BackwardArgs {
  const void* dy;      // [rows, cols], s's type
  const void* ds;      // [rows, cols], s's type; nullptr: s has no gradient of its own
  const void* s;       // [rows, cols]
  const void* weight;  // [cols]; nullptr: no weight
  const float* rstd;   // [rows]
  void* dx;            // [rows, cols], the gradient of x and of residual; nullptr: not wanted
  void* dw;            // [cols] of dw_dtype, summed in fp32; nullptr: not wanted
  int64_t rows, cols;
  int64_t dy_stride, ds_stride, s_stride, dx_stride;
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
#include <liger_kernel/ops/fused_add_rms_norm/variants.inc>

}  // namespace liger::fused_add_rms_norm
