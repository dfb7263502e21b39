// Kullback-Leibler divergence between target probabilities and predicted log-probabilities, element by element:
//
//   loss  = p (log max(p, eps) - input)        p = target
//   loss  = p (target - input)                 p = e^target, when targets are logarithms too
//   dinput = -p
//
// Where p = 0 the loss is 0, also against -inf. total = factor * sum of loss, and its gradient in the same pass: both operands are
// read once and the gradient written once. Elements are fp32 inside.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::kl_div {

struct ForwardArgs {
  const void* input;   // [rows, cols] logarithms
  const void* target;  // [rows, cols]
  float* loss;         // [rows, cols], of each element; nullptr: not wanted
  float* total;        // [1]; nullptr: not wanted
  void* grad;          // [rows, cols], input's type, gradient of total; nullptr: not wanted
  int64_t rows, cols;
  int64_t input_stride, target_stride, loss_stride, grad_stride;  // elements from row to row
  DType dtype, target_dtype;
  float factor = 1;
  bool log_target = false;
  float eps = 0;
};

// grad = -p factor dy, for a gradient of each element's loss or of the total.
struct BackwardArgs {
  const float* dy;  // [rows, cols], or [1] of the total
  bool of_total;
  const void* target;  // [rows, cols]
  void* grad;          // [rows, cols]
  int64_t rows, cols;
  int64_t dy_stride, target_stride, grad_stride;
  DType dtype, target_dtype;  // of grad, of target
  float factor = 1;
  bool log_target = false;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/kl_div/variants.inc>

}  // namespace liger::kl_div
