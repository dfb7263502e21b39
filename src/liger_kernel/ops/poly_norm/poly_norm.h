// PolyNorm over the last dimension (Zhuo et al. 2024, PolyCom), with the powers p = 3, 2, 1 of a row x:
//
//   r_p = 1 / sqrt(mean(x^2p) + eps)         y = sum over p of w_p r_p x^p, + b
//   m_p = mean(g x^p), g = dy                dx = sum over p of p w_p r_p (g x^(p-1) - r_p^2 m_p x^(2p-1))
//   dw_p = sum over rows of cols r_p m_p     db = sum over rows and columns of g
//
// Everything is fp32 and rounded once at the store. weight[0] belongs to x^3, weight[2] to x.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::poly_norm {

constexpr int kPowers = 3;

struct ForwardArgs {
  const void* x;       // [rows, cols]
  const void* weight;  // [3]
  const void* bias;    // [1]
  void* y;             // [rows, cols], x's type
  float* rstd;         // [rows, 3]: r_3, r_2, r_1
  int64_t rows, cols;
  int64_t x_stride, y_stride;  // elements from row to row
  DType dtype, weight_dtype, bias_dtype;
  float eps;
};

struct BackwardArgs {
  const void* dy;      // [rows, cols], x's type
  const void* x;       // [rows, cols]
  const void* weight;  // [3]
  const float* rstd;   // [rows, 3]
  void* dx;            // [rows, cols]; nullptr: not wanted
  void* dw;            // [3], weight's type; nullptr: not wanted
  void* db;            // [1], bias's type; nullptr: not wanted
  int64_t rows, cols;
  int64_t dy_stride, x_stride, dx_stride;
  DType dtype, weight_dtype, bias_dtype;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/poly_norm/variants.inc>

}  // namespace liger::poly_norm
