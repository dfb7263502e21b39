// Distillation losses of logits = x weight^T + bias of a student against a teacher, without the [rows, vocab] matrices: rows go through
// in chunks, and the student's gradients of a chunk are formed while its logits are there.
//
//   for each chunk:  s = x_c weight^T + bias,  t = (the same of the teacher)     two scratches [chunk, vocab], reused
//                    ds = gradient of the divergence of s and t, over s          one kernel
//                    dx_c = ds weight,  dw (+)= ds^T x_c,  db (+)= column sums   as in fused_linear_cross_entropy
//
// so there are four products. With z = logit / temperature and Q, P the softmax of the student's and the teacher's z, per row:
//
//   kJensenShannon  soft = the divergence of ops/jsd of log Q and log P
//                   ds = (g - Q sum g) / temperature,  g = its derivative by log Q
//   kCosine         soft = beta (1 - cos(s, t)),  norms at least 1e-8
//   kProbabilities  soft = sum p (log max(p, eps) - log Q), p given, ds = (Q sum p - p) / temperature: KL(p || Q)
//   hard            cross entropy of the student's logits, not tempered, with the label
//
//   ds of the row = soft_scale d soft + hard_scale d hard, both divided by the number of labels that are not ignored
//
// A teacher may have more entries than the student (padded heads): the student's z is 0 there. Rows whose label is ignored are left out
// where the host knows their number. weight is read in forward only, so a trainer may take it away before backward.
#pragma once
#include <span>

#include <liger_kernel/core/variant.h>
#include <liger_kernel/ops/cross_entropy/cross_entropy.h>

namespace liger::fused_linear_jsd {

using cross_entropy::LabelStats;

enum class Divergence : int { kJensenShannon = 0, kCosine = 1, kProbabilities = 2 };

struct Loss {
  Divergence divergence = Divergence::kJensenShannon;
  float beta = 0.5f, temperature = 1, eps = 1e-10f;
  float soft_scale = 1, hard_scale = 0;  // of the gradients
};

struct Head {
  const void* x;       // [rows, hidden]
  const void* weight;  // [vocab, hidden]
  const void* bias;    // [vocab], contiguous; or nullptr
  int64_t hidden, vocab;
  int64_t x_stride, weight_stride;  // elements from row to row
};

struct ForwardArgs {
  Head student;
  Head teacher;             // kProbabilities: x [rows, vocab] are the probabilities, the rest is unused
  const int64_t* target;    // [rows] labels; nullptr: no row is ignored, and no hard loss
  const LabelStats* stats;  // of the labels, on the device; nullptr: not divided by their number
  float* soft;              // [rows]
  float* hard;              // [rows]; nullptr: no hard loss
  void* dx;                 // [rows, hidden], contiguous, x's type; nullptr: not wanted
  void* dw;                 // [vocab, hidden], contiguous, of the plan's accumulator type; nullptr: not wanted
  float* db;                // [vocab]; nullptr: not wanted
  int64_t rows, target_stride;
  DType dtype;               // of all x, weights and biases
  DType probability_dtype;   // of kProbabilities
  DType dw_result;           // what the caller makes of dw afterwards: fp32 or dtype
  int64_t valid_rows = -1;   // labels that are not ignored; -1: unknown to the host, no row is left out
  int64_t logits_bytes = 0;  // most bytes of logits scratch; 0: the default of plan.h
  int64_t ignore_index = -100;
  Loss loss = {};
};

// One chunk of logits. Rows of `student` are overwritten by their gradient when `gradient`. Where a stride reaches beyond the columns,
// so does the memory of the last row: kernels may read a whole vector there.
struct DivergenceArgs {
  void* student;               // [rows, vocab]
  const void* teacher;         // [rows, teacher_vocab] logits, or [*, vocab] probabilities
  const int64_t* teacher_row;  // row of `teacher` that belongs to each; nullptr: the same
  const int64_t* target;       // [rows] or nullptr
  const LabelStats* stats;     // or nullptr
  float* soft;                 // [rows]
  float* hard;                 // [rows] or nullptr
  int64_t rows, vocab, teacher_vocab;
  int64_t student_stride, teacher_stride, target_stride;
  DType dtype, teacher_dtype;  // equal but for probabilities
  int64_t ignore_index;
  Loss loss;
  bool gradient;
};

void forward(const ForwardArgs& args, const Host& host);
void divergence(const DivergenceArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/fused_linear_jsd/variants.inc>

}  // namespace liger::fused_linear_jsd
