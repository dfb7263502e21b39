// Cross entropy over the last dimension with the gradient in the same pass: the row is read once and the gradient written once.
//
//   x = softcap tanh(logit * logit_scale / softcap)  (softcap 0: x = logit * logit_scale)
//   lse = log sum exp(x),  p = exp(x - lse),  y = target,  s = label_smoothing,  eps = s / vocab,  w = class weights
//   loss  = ((1-s) w_y (lse - x_y) + eps (lse sum(w) - sum(w x))) * scale_loss + z,   z = lse_square_scale lse^2 * scale_z
//   dx    = ((1-s) w_y (p - [y]) + eps (p sum(w) - w)) * scale_loss + 2 lse_square_scale lse p * scale_z
//   dlogit = dx * (1 - (x / softcap)^2) * logit_scale
//
// without weights w = 1 and sum(w) = vocab. The target's own gradient is formed as minus the sum of the other terms, without
// the cancellation of p_y - 1, and its loss as log1p of the others' share. An ignored row gives loss 0, gradient 0,
// hit 0, prediction -1; so does a row that is skipped. A target outside [0, vocab) reads nothing and gives loss NaN.
#pragma once
#include <span>

#include <liger_kernel/core/variant.h>

namespace liger::cross_entropy {

// Counts over all labels, written to device memory in one launch; every consumer reads them there.
struct LabelStats {
  float inverse_count;   // 1 / rows that are not ignored; 0 when there are none
  float inverse_weight;  // 1 / sum of the class weights of those rows' targets (without weights: inverse_count)
  int32_t count;         // rows that are not ignored
  int32_t below;         // targets < 0 that are not ignore_index
  int32_t above;         // targets >= vocab that are not ignore_index
  float weight_sum;      // sum of all class weights; vocab without weights
};

struct StatsArgs {
  const int64_t* target;      // [rows]
  const float* class_weight;  // [vocab] or nullptr
  LabelStats* stats;          // one, on the device
  int64_t rows, vocab, target_stride;
  int64_t ignore_index = -100;
};

struct ForwardArgs {
  const void* logits;         // [rows, vocab]
  const int64_t* target;      // [rows]
  const float* class_weight;  // [vocab] or nullptr
  const LabelStats* stats;    // of the whole call, on the device
  const float* row_scale;     // [rows] factor of loss, z and gradient of each row; nullptr: 1
  void* grad;                 // [rows, vocab], logits' type; may be logits itself; nullptr: no gradient
  float* loss;                // [rows], z included
  float* z_loss;              // [rows] or nullptr
  float* hit;                 // [rows] 1 when the first largest x is the target; or nullptr
  int64_t* prediction;        // [rows] index of the first largest x; or nullptr
  int64_t rows, vocab;
  int64_t logits_stride, grad_stride, target_stride;  // elements from row to row
  DType dtype;
  int64_t ignore_index = -100;
  float label_smoothing = 0, lse_square_scale = 0, softcap = 0, logit_scale = 1;
  bool mean = true;            // scale_loss = inverse_weight, scale_z = inverse_count; else both 1
  bool token_scaling = false;  // multiply loss, z and gradient of a row by p_y, taken as a constant
};

// The rows' results as one number each: sums of the losses and of z, and the share of hits among the rows that are not ignored.
struct TotalsArgs {
  const float* loss;    // [rows]
  const float* z_loss;  // [rows] or nullptr
  const float* hit;     // [rows] or nullptr
  const LabelStats* stats;
  void* total;      // one element of `dtype`
  void* z_total;    // one, or nullptr
  float* accuracy;  // one, or nullptr
  int64_t rows;
  DType dtype;
};

// grad_out = grad * factor, factor one number (per_row false) or one per row; on CUDA the factor 1 is detected on the
// device and, when grad_out is grad, nothing is read or written.
struct ScaleArgs {
  const void* grad;
  void* grad_out;      // may be grad
  const void* factor;  // [1] or [rows]
  DType factor_dtype;
  bool per_row;
  int64_t rows, vocab, grad_stride, out_stride;
  DType dtype;
};

void label_stats(const StatsArgs& args, const Host& host);
void forward(const ForwardArgs& args, const Host& host);
void totals(const TotalsArgs& args, const Host& host);
void scale(const ScaleArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/cross_entropy/variants.inc>

}  // namespace liger::cross_entropy
