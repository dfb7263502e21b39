// Softmax over the last dimension:
//
//   y = exp(x - max x) / sum exp(x - max x)        dx = y (dy - sum of dy y)
//
// fp32 inside, rounded once. A row with NaN or +inf, or of nothing but -inf, gives NaN, as torch does.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::softmax {

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
#include <liger_kernel/ops/softmax/variants.inc>

}  // namespace liger::softmax
