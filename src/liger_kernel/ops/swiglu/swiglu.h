// SiLU-gated unit (Shazeer 2020): with s = sigmoid(x), x = gate_multiplier * a,
//
//   c  = silu(x) * b * down_multiplier        silu(x) = x s, rounded to the operands' type before the product
//   da = dc * down_multiplier * b * (s + silu(x) (1 - s)) * gate_multiplier
//   db = dc * down_multiplier * silu(x)
//
// fp32 inside. a and b may be the two halves of one packed [rows, 2 cols] matrix: their strides are their own.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::swiglu {

struct ForwardArgs {
  const void* a;  // [rows, cols] gate
  const void* b;  // [rows, cols] up
  void* c;        // [rows, cols]
  int64_t rows, cols;
  int64_t a_stride, b_stride, c_stride;  // elements from row to row
  DType dtype;
  float gate_multiplier = 1;
  float down_multiplier = 1;
};

struct BackwardArgs {
  const void* dc;  // [rows, cols]
  const void* a;   // [rows, cols]
  const void* b;   // [rows, cols]
  void* da;        // [rows, cols]; nullptr: not wanted; may be a itself
  void* db;        // [rows, cols]; nullptr: not wanted; may be b itself
  int64_t rows, cols;
  int64_t dc_stride, a_stride, b_stride, da_stride, db_stride;
  DType dtype;
  float gate_multiplier = 1;
  float down_multiplier = 1;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/swiglu/variants.inc>

}  // namespace liger::swiglu
