// Squared ReLU (So et al. 2021, Primer), elementwise:
//
//   y  = max(x, 0)^2             dx = 2 max(x, 0) dy, exactly 0 where x <= 0 whatever dy is
//
// fp32 inside, one rounding at the store. NaN stays NaN.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::relu_squared {

struct ForwardArgs {
  const void* x;  // [rows, cols]
  void* y;        // [rows, cols]
  int64_t rows, cols;
  int64_t x_stride, y_stride;  // elements from row to row
  DType dtype;
};

struct BackwardArgs {
  const void* dy;  // [rows, cols]
  const void* x;   // [rows, cols]
  void* dx;        // [rows, cols]; may be dy or x itself
  int64_t rows, cols;
  int64_t dy_stride, x_stride, dx_stride;
  DType dtype;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/relu_squared/variants.inc>

}  // namespace liger::relu_squared
