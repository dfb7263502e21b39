// Cross entropy of logits = x weight^T + bias (the arithmetic of ops/cross_entropy) without the [rows, vocab] matrix: rows go
// through in chunks, and both gradients of a chunk are formed while its logits are there.
//
//   for each chunk:  z  = x_c weight^T + bias              one scratch [chunk, vocab], reused
//                    dz = gradient of cross entropy        in place, ops/cross_entropy
//                    dx_c = dz weight                      [chunk, hidden]
//                    dw (+)= dz^T x_c,  db (+)= column sums of dz     the first chunk stores, later ones add
//
// Rows whose label is ignored are left out where the host knows their number: the others are gathered, and dx is scattered.
// weight is read in forward only, so a trainer may take it away before backward.
#pragma once
#include <string>

#include <liger_kernel/ops/cross_entropy/cross_entropy.h>

namespace liger::fused_linear_cross_entropy {

struct ForwardArgs {
  const void* x;                           // [rows, hidden]
  const void* weight;                      // [vocab, hidden]
  const void* bias;                        // [vocab], contiguous; or nullptr
  const int64_t* target;                   // [rows]
  const float* class_weight;               // [vocab] or nullptr
  const cross_entropy::LabelStats* stats;  // of the whole call, on the device
  const float* row_scale;                  // [rows] factor of loss, z and gradient of each row; nullptr: 1
  float* loss;                             // [rows], z included
  float* z_loss;                           // [rows] or nullptr
  float* hit;                              // [rows] or nullptr
  int64_t* prediction;                     // [rows] or nullptr
  void* dx;                                // [rows, hidden], contiguous, x's type; nullptr: not wanted
  void* dw;                                // [vocab, hidden], contiguous, of the plan's accumulator type; nullptr: not wanted
  float* db;                               // [vocab]; nullptr: not wanted
  int64_t rows, hidden, vocab;
  int64_t x_stride, weight_stride, target_stride;  // elements from row to row
  DType dtype;                                     // of x, weight and bias
  DType dw_result;                                 // what the caller makes of dw afterwards: fp32 or dtype
  bool low_accumulation = false;                   // CUDA: sum dw in dw_result, half the memory of fp32, one rounding per chunk
  int64_t valid_rows = -1;                         // labels that are not ignored; -1: unknown to the host, no row is left out
  int64_t logits_bytes = 0;                        // most bytes of logits scratch; 0: the default of plan.h
  int64_t chunk_mem = 1;                           // above 1: chunks may grow to about chunk_mem * rows * hidden logits
  int64_t ignore_index = -100;
  float label_smoothing = 0, lse_square_scale = 0, softcap = 0, logit_scale = 1;
  bool mean = true, token_scaling = false;
};

// slot[row] = place among the rows that are not ignored, or -1; row_of[place] = row; their targets and factors side by side.
struct CompactArgs {
  const int64_t* target;   // [rows]
  const float* row_scale;  // [rows] or nullptr
  int64_t* slot;           // [rows]
  int64_t* row_of;         // [valid]
  int64_t* target_out;     // [valid]
  float* row_scale_out;    // [valid] or nullptr
  int64_t rows, valid, target_stride, ignore_index;
};

// dst[i] (+)= src[i] for rows of `cols` elements, i replaced by src_row[i] or dst_row[i] where these are given: gather, scatter,
// broadcast (src_stride 0), conversion and accumulation. CUDA copies one type, or converts fp32 to a 16-bit type.
struct MoveArgs {
  const void* src;  // nullptr: zeros
  void* dst;
  const int64_t* src_row = nullptr;
  const int64_t* dst_row = nullptr;
  int64_t rows, cols, src_stride, dst_stride;
  DType src_dtype, dst_dtype;
  bool accumulate = false;
};

// out[column] (+)= sum over rows of a[row, column], in fp32 and a fixed order.
struct SumArgs {
  const void* a;  // [rows, cols]
  float* out;     // [cols]
  int64_t rows, cols, stride;
  DType dtype;
  bool accumulate;
};

// The per-row results of the compacted rows go to their places; ignored rows get loss, z and hit 0, prediction -1, dx 0.
struct SpreadArgs {
  const int64_t* slot;               // [rows]
  const float *loss, *z_loss, *hit;  // [valid], or nullptr with their outputs
  const int64_t* prediction;         // [valid] or nullptr
  float *loss_out, *z_loss_out, *hit_out;
  int64_t* prediction_out;
  void* dx;  // [rows, hidden], contiguous, or nullptr
  int64_t rows, hidden;
  DType dtype;
};

void forward(const ForwardArgs& args, const Host& host);
void compact(const CompactArgs& args, const Host& host);
void move_rows(const MoveArgs& args, const Host& host);
void column_sums(const SumArgs& args, const Host& host);
void spread(const SpreadArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/fused_linear_cross_entropy/variants.inc>

}  // namespace liger::fused_linear_cross_entropy
