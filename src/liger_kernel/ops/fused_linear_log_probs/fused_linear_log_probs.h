// Log-probabilities of target tokens and the entropy of the distribution they are drawn from, of logits = x weight^T + bias, without
// the [rows, vocab] matrix.
//
//   z = cap(logit * logit_scale) / temperature,  cap(v) = softcap tanh(v / softcap)  (softcap 0: v)
//   lse = log sum exp(z),  p = exp(z - lse),  y = target
//   logp = z_y - lse,  entropy = lse - sum p z
//
// Two ways through the logits:
//   forward, backward    tiles of all rows and some columns. Rows' sums are carried from tile to tile; dw of a tile is complete,
//                        dx is summed in fp32. backward makes the logits again: four products in all.
//   chunk_forward, chunk_backward   some rows and all columns, in memory of the caller's. Between the two the caller turns
//                        log-probabilities into the factors of their gradients: three products, dw summed over the chunks.
//
// An ignored row has results 0, prediction -1 and no gradient. A target outside [0, vocab) reads nothing and gives NaN.
#pragma once
#include <span>

#include <liger_kernel/core/variant.h>

namespace liger::fused_linear_log_probs {

struct Transform {  // from a logit to z
  float softcap = 0, logit_scale = 1, temperature = 1;
};

// What is known of a row after some of its columns. `others` leaves out one element equal to the largest: then log1p(others), and
// with it the entropy and the log-probability of a near-certain token, keep their relative precision.
struct RowState {
  float largest;            // of z
  float target;             // z of the target
  double others;            // sum of exp(z - largest) over all but one largest element; -1 before the first
  double weighted;          // sum of exp(z - largest) (z - largest), every term <= 0
  unsigned long long best;  // order of the largest z above, complement of its column below: the first wins, NaN above all
};

// What forward finds, one number a row. lse = largest + log_sum, known to both parts' precision. fp32.
struct Results {
  float* logp;
  float* largest;
  float* log_sum;       // log sum exp(z - largest)
  float* entropy;       // or nullptr
  int64_t* prediction;  // first column with the largest z; or nullptr
};
struct SavedResults {
  const float *logp, *largest, *log_sum;
  const float* entropy;  // needed with an upstream gradient of the entropy
};

// d(loss) / d(result), one number a row; nullptr: 0.
struct Upstream {
  const float *logp, *entropy, *lse;
};

struct Problem {
  const void* x;          // [rows, hidden]
  const void* weight;     // [vocab, hidden]
  const void* bias;       // [vocab], contiguous; or nullptr
  const int64_t* target;  // [rows]
  int64_t rows, hidden, vocab;
  int64_t x_stride, weight_stride, target_stride;  // elements from row to row
  DType dtype;                                     // of x, weight and bias
  int64_t ignore_index = -100;
  Transform transform = {};
  int64_t logits_bytes = 0;  // of a tile of logits; 0: the default of plan.h
};

struct Gradients {
  float* dx;                 // [rows, hidden], contiguous; nullptr: not wanted
  void* dw;                  // [vocab, hidden], contiguous; nullptr: not wanted
  float* db;                 // [vocab]; nullptr: not wanted
  DType dw_dtype;            // fp32, or x's type
  bool add_to_sums = false;  // to dw (then fp32) and db
};

void forward(const Problem& problem, const Results& results, const Host& host);
void backward(const Problem& problem, const SavedResults& saved, const Upstream& upstream, const Gradients& gradients, const Host& host);

// Bytes of the logits of a chunk: problem.rows rows, all columns.
int64_t chunk_bytes(const Problem& problem, const Machine& machine);
// `logits` holds the logits after chunk_forward; chunk_backward overwrites them.
void chunk_forward(const Problem& problem, void* logits, const Results& results, const Host& host);
void chunk_backward(const Problem& problem, void* logits, const SavedResults& saved, const Upstream& upstream, const Gradients& gradients,
                    const Host& host);

// Columns [first, first + cols) of the vocabulary: into the rows' states, and after the last of them to the results.
struct StatisticsArgs {
  const void* logits;     // [rows, cols]
  const int64_t* target;  // [rows]
  RowState* state;        // [rows]; untouched when the columns are all
  Results results;
  int64_t rows, cols, first, vocab;
  int64_t logits_stride, target_stride;
  DType dtype;
  int64_t ignore_index;
  Transform transform;
};

// The gradient, written beside the logits or over them.
struct GradientArgs {
  const void* logits;     // [rows, cols]
  void* grad;             // [rows, cols], of the logits' type; may be the logits
  const int64_t* target;  // [rows]
  SavedResults saved;
  Upstream upstream;
  int64_t rows, cols, first, vocab;
  int64_t logits_stride, grad_stride, target_stride;
  DType dtype;
  int64_t ignore_index;
  Transform transform;
};

void statistics(const StatisticsArgs& args, const Host& host);
void gradient(const GradientArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/fused_linear_log_probs/variants.inc>

}  // namespace liger::fused_linear_log_probs
