// Sparsemax (Martins and Astudillo 2016), the Euclidean projection of each row onto the simplex:
//
//   y = max(x - tau, 0) with tau such that sum y = 1        dx = dy - mean of dy over the support where y > 0, else 0
//
// tau = (sum of x over the support - 1) / its size. fp32 inside, rounded once; x is taken relative to its largest element. A row with
// NaN or +inf, or of nothing but -inf, gives NaN; -inf beside finite elements gives 0.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::sparsemax {

struct ForwardArgs {
  const void* x;  // [rows, cols]
  void* y;        // [rows, cols], x's type
  int64_t rows, cols;
  int64_t x_stride, y_stride;  // elements from row to row
  DType dtype;
};

struct BackwardArgs {
  const void* dy;  // [rows, cols]
  const void* y;   // [rows, cols], the result of forward
  void* dx;        // [rows, cols]; all of one type
  int64_t rows, cols;
  int64_t dy_stride, y_stride, dx_stride;
  DType dtype;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/sparsemax/variants.inc>

}  // namespace liger::sparsemax
