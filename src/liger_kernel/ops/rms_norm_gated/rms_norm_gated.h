// RMSNorm with a gate, as the mixers of hybrid models end: Gated DeltaNet (Yang et al. 2024) normalises and then gates, Mamba-2
// (Dao & Gu 2024) gates and then normalises. Over each group of group_size columns, a = act(gate):
//
//   norm, then gate:  h = x,    hat = h rstd,  y = hat weight a
//   gate, then norm:  h = x a,  hat = h rstd,  y = hat weight                rstd = 1 / sqrt(mean(h^2) + eps)
//
//   g = dy weight (times a, norm first),  dh = rstd (g - hat mean(g hat)),  dw = sum over rows of g / weight * hat
//   norm, then gate:  dx = dh,    dgate = dy hat weight act'(gate)
//   gate, then norm:  dx = dh a,  dgate = dh x act'(gate)
//
// fp32 inside. `rounding` kBeforeWeight rounds hat to x's type, and hat weight too where a gate follows and the weight has x's type;
// kLast rounds at the store alone. dw and dgate take hat and hat weight as the forward rounded them.
#pragma once
#include <string>

#include <liger_kernel/core/rms.h>
#include <liger_kernel/core/variant.h>

namespace liger::rms_norm_gated {

enum class Activation : int8_t { kSilu = 0, kSigmoid = 1 };

struct ForwardArgs {
  const void* x;       // [rows, cols]
  const void* gate;    // [rows, cols]; nullptr: no gate, a = 1
  const void* weight;  // [cols]; nullptr: no weight
  void* y;             // [rows, cols], x's type
  float* rstd;         // [rows, cols / group_size]
  int64_t rows, cols, group_size;
  int64_t x_stride, gate_stride, y_stride;  // elements from row to row
  DType dtype, weight_dtype;
  float eps;
  Activation activation = Activation::kSilu;
  bool norm_first = true;
  Rounding rounding = Rounding::kBeforeWeight;
};

struct BackwardArgs {
  const void* dy;      // [rows, cols], x's type
  const void* x;       // [rows, cols]
  const void* gate;    // [rows, cols]; nullptr: no gate, a = 1
  const void* weight;  // [cols]; nullptr: no weight
  const float* rstd;   // [rows, cols / group_size]
  void* dx;            // [rows, cols]; nullptr: not wanted
  void* dgate;         // [rows, cols]; nullptr: not wanted
  void* dw;            // [cols] of dw_dtype, summed in fp32; nullptr: not wanted
  int64_t rows, cols, group_size;
  int64_t dy_stride, x_stride, gate_stride, dx_stride, dgate_stride;
  DType dtype, weight_dtype;
  DType dw_dtype = DType::kF32;
  Activation activation = Activation::kSilu;
  bool norm_first = true;
  Rounding rounding = Rounding::kBeforeWeight;
};

// Whether hat weight is rounded to x's type before the gate multiplies it.
template <class Args>
bool rounds_product(const Args& a) {
  return a.norm_first && a.rounding == Rounding::kBeforeWeight && a.weight && a.weight_dtype == a.dtype;
}

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does, when cols are no multiple of group_size,
// and for Rounding::kEachStep.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/rms_norm_gated/variants.inc>

}  // namespace liger::rms_norm_gated
