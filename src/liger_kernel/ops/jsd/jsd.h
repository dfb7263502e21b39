// Generalised Jensen-Shannon divergence of log-probabilities, with the gradient in the same pass: both rows are read once and the
// gradient is written once.
//
//   x = log q (student),  y = log p (teacher),  Q = e^x,  P = e^y,  M = beta P + (1 - beta) Q
//   beta = 0:  loss = sum P (y - x)                                          dx = -P
//   beta = 1:  loss = sum Q (x - y)                                          dx = Q (x - y) + Q
//   else:      loss = sum beta P (y - log M) + (1 - beta) Q (x - log M)      dx = (1 - beta) Q (x - log M)
//
// x and y are free variables, as these derivatives show: nothing makes them sum to one. A probability of 0 (x or y of -inf) takes no
// part: 0 log 0 = 0. Loss and gradient of a row are multiplied by `scale`, and with `stats` by 1 / (labels that are not ignored).
// A row whose label is ignored gives 0.
#pragma once
#include <span>

#include <liger_kernel/core/variant.h>
#include <liger_kernel/ops/cross_entropy/cross_entropy.h>

namespace liger::jsd {

struct ForwardArgs {
  const void* log_q;                       // [rows, cols]
  const void* log_p;                       // [rows, cols]
  const int64_t* target;                   // [rows] labels; nullptr: no row is ignored
  const cross_entropy::LabelStats* stats;  // of the labels, on the device; nullptr: not divided by their number
  void* dx;                                // [rows, cols]; nullptr: not wanted
  float* loss;                             // [rows]
  int64_t rows, cols;
  int64_t q_stride, p_stride, dx_stride, target_stride;  // elements from row to row
  DType dtype;                                           // of log_q, log_p and dx
  int64_t ignore_index = -100;
  float beta = 0.5f, scale = 1;
};

void forward(const ForwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/jsd/variants.inc>

}  // namespace liger::jsd
