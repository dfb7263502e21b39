// Softmax over the last dimension:
//
//   y = exp(x - max x) / sum exp(x - max x)        dx = y (dy - sum of dy y)
//
// fp32 inside, rounded once. A row with NaN or +inf, or of nothing but -inf, gives NaN, as torch does.
#pragma once
#include <liger_kernel/core/row_map.h>

namespace liger::softmax {

using ForwardArgs = RowMapForward;
using BackwardArgs = RowMapBackward;

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/softmax/variants.inc>

}  // namespace liger::softmax
