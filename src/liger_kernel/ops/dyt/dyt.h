// Dynamic tanh (Zhu et al. 2025), elementwise with a scalar alpha and, for each column, gamma and beta:
//
//   t = tanh(alpha x)        y = t gamma + beta
//   s = dy gamma (1 - t^2)   dx = s alpha       dalpha = sum of s x
//                            dgamma = sum over rows of dy t       dbeta = sum over rows of dy
//
// Everything is fp32 and rounded once at the store.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::dyt {

struct ForwardArgs {
  const void* x;      // [rows, cols]
  const void* alpha;  // [1]
  const void* gamma;  // [cols]
  const void* beta;   // [cols]; nullptr: zeros
  void* y;            // [rows, cols], x's type
  int64_t rows, cols;
  int64_t x_stride, y_stride;  // elements from row to row
  DType dtype, alpha_dtype, gamma_dtype, beta_dtype;
};

struct BackwardArgs {
  const void* dy;     // [rows, cols], x's type
  const void* x;      // [rows, cols]
  const void* alpha;  // [1]
  const void* gamma;  // [cols]
  void* dx;           // [rows, cols]; nullptr: not wanted
  void* dalpha;       // [1], alpha's type; nullptr: not wanted
  void* dgamma;       // [cols], gamma's type; nullptr: not wanted
  void* dbeta;        // [cols], beta's type; nullptr: not wanted
  int64_t rows, cols;
  int64_t dy_stride, x_stride, dx_stride;
  DType dtype, alpha_dtype, gamma_dtype, beta_dtype;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/dyt/variants.inc>

}  // namespace liger::dyt
