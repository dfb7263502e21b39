// LayerNorm over the last dimension (Ba, Kiros & Hinton 2016):
//
//   mean = mean(x)    rstd = 1 / sqrt(mean((x - mean)^2) + eps)    hat = (x - mean) * rstd
//   y  = hat * (weight + weight_offset) + bias
//   dx = rstd * (g - mean(g) - hat * mean(g * hat)),  g = dy * (weight + weight_offset)
//   dw = sum over rows of dy * hat                    db = sum over rows of dy
//
// Everything is fp32 and rounded once at the store. The mean is taken first and the centred row then gives the variance and a
// correction of the mean, so that rows far from zero keep their accuracy.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::layer_norm {

struct ForwardArgs {
  const void* x;       // [rows, cols]
  const void* weight;  // [cols]; nullptr: ones, the offset is unused
  const void* bias;    // [cols]; nullptr: zeros
  void* y;             // [rows, cols], x's type
  float* mean;         // [rows]
  float* rstd;         // [rows]
  int64_t rows, cols;
  int64_t x_stride, y_stride;  // elements from row to row
  DType dtype, weight_dtype, bias_dtype;
  float eps;
  float weight_offset = 0;
};

struct BackwardArgs {
  const void* dy;      // [rows, cols], x's type
  const void* x;       // [rows, cols]
  const void* weight;  // [cols]; nullptr: ones
  const float* mean;   // [rows]
  const float* rstd;   // [rows]
  void* dx;            // [rows, cols]; nullptr: not wanted
  void* dw;            // [cols], weight's type; nullptr: not wanted
  void* db;            // [cols], bias's type; nullptr: not wanted
  int64_t rows, cols;
  int64_t dy_stride, x_stride, dx_stride;
  DType dtype, weight_dtype, bias_dtype;
  float weight_offset = 0;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/layer_norm/variants.inc>

}  // namespace liger::layer_norm
