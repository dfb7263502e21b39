// Total variation distance between two distributions p and q, element by element:
//
//   loss = |p - q| / 2        dp = sign(p - q) / 2, 0 where they are equal
//
// A row whose label is ignore_index gives 0. total = factor * scale * sum of loss, and its gradient in the same pass: both operands are
// read once and the gradient written once. Elements are fp32 inside.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::tvd {

struct ForwardArgs {
  const void* input;      // [rows, cols] p
  const void* target;     // [rows, cols] q
  const int64_t* labels;  // [rows] or nullptr: all rows count
  const float* scale;     // [1] on the device, of total and grad; nullptr: 1
  float* loss;            // [rows, cols], of each element; nullptr: not wanted
  float* total;           // [1]; nullptr: not wanted
  void* grad;             // [rows, cols], input's type, gradient of total; nullptr: not wanted
  int64_t rows, cols;
  int64_t input_stride, target_stride, loss_stride, grad_stride, labels_stride;  // elements from row to row
  DType dtype, target_dtype;
  float factor = 1;
  int64_t ignore_index = -100;
};

// grad = sign(p - q) / 2 factor scale dy, for a gradient of each element's loss or of the total.
struct BackwardArgs {
  const float* dy;  // [rows, cols], or [1] of the total
  bool of_total;
  const void* input;      // [rows, cols]
  const void* target;     // [rows, cols]
  const int64_t* labels;  // [rows] or nullptr
  const float* scale;     // [1] or nullptr
  void* grad;             // [rows, cols], input's type
  int64_t rows, cols;
  int64_t dy_stride, input_stride, target_stride, grad_stride, labels_stride;
  DType dtype, target_dtype;
  float factor = 1;
  int64_t ignore_index = -100;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/tvd/variants.inc>

}  // namespace liger::tvd
