// Sparsemax (Martins and Astudillo 2016), the Euclidean projection of each row onto the simplex:
//
//   y = max(x - tau, 0) with tau such that sum y = 1        dx = dy - mean of dy over the support where y > 0, else 0
//
// tau = (sum of x over the support - 1) / its size. fp32 inside, rounded once; x is taken relative to its largest element. A row with
// NaN or +inf, or of nothing but -inf, gives NaN; -inf beside finite elements gives 0.
#pragma once
#include <liger_kernel/core/row_map.h>

namespace liger::sparsemax {

using ForwardArgs = RowMapForward;
using BackwardArgs = RowMapBackward;

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/sparsemax/variants.inc>

}  // namespace liger::sparsemax
