// GELU-gated unit (Shazeer 2020; Hendrycks & Gimpel 2016):
//
//   c  = gelu(a) * b          gelu rounded to the operands' type before the product
//   da = dc * b * gelu'(a)    db = dc * gelu(a), gelu rounded likewise
//
// gelu(a) = a Phi(a), Phi the normal distribution function (`exact`), or its approximation
// a / 2 (1 + tanh(sqrt(2 / pi) (a + 0.044715 a^3))). fp32 inside. Each operand has its own row stride.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::geglu {

struct ForwardArgs {
  const void* a;  // [rows, cols] gate
  const void* b;  // [rows, cols] up
  void* c;        // [rows, cols]
  int64_t rows, cols;
  int64_t a_stride, b_stride, c_stride;  // elements from row to row
  DType dtype;
  bool exact = false;
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
  bool exact = false;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/geglu/variants.inc>

}  // namespace liger::geglu
