// Mixture of gated experts (Shazeer et al. 2017; SwiGLU: Shazeer 2020). Token t goes to the experts e = index[t, k], k < top_k:
//
//   h_tk   = gate_up_e x_t = (g, u)            a_tk = round(silu(g)) u          y_tk = down_e a_tk
//   out_t  = sum over k of weight_tk y_tk
//
// Choices are sorted by expert, so that each expert's are adjacent rows ("slots") of every [slots, ...] matrix here; experts outside
// [0, experts) are none: their slots come last, starts[experts] is where they begin, and no pass reads or writes what follows it
// unless it says so. Backward, with dy the upstream gradient of each slot's token:
//
//   da     = down_e^T dy                       dweight_tk = da . a_tk
//   (dg, du) = weight_tk da (u silu'(g), silu(g))
//   d down_e = sum dy (weight_tk a_tk)^T       d gate_up_e = sum dh x^T       dx_t = sum over k of gate_up_e^T dh_tk
//
// so that forward keeps h alone: neither the experts' outputs y nor a are needed again.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::fused_moe {

// Sorts the choices by expert; those of one expert stay in order.
struct RouteArgs {
  const void* index;  // [slots] expert of choice t top_k + k: int64 or int32
  int32_t* starts;    // [experts + 1] first slot of each expert, then the number of slots with an expert
  int32_t* token;     // [slots] token of each slot
  int32_t* order;     // [slots] choice of each slot
  int32_t* place;     // [slots] slot of each choice
  int64_t slots, experts, top_k;
  bool wide;  // int64
};

// out_t = sum over k of weight_tk y[place_tk], fp32 inside and in the order of k. Choices without expert add nothing.
struct CombineArgs {
  const void* y;          // [slots, cols] without gaps
  const int32_t* place;   // [tokens, top_k]
  const int32_t* starts;  // [experts + 1]
  const float* weight;    // [tokens, top_k]; nullptr: all one
  void* out;              // [tokens, cols] without gaps
  int64_t tokens, top_k, cols, experts;
  DType dtype;
};

// From da and h: dh, weight a and dweight, each unless nullptr. Matrices without gaps.
struct GateGradientArgs {
  const void* da;         // [slots, cols]; nullptr: neither dh nor dweight is wanted
  const void* h;          // [slots, 2 cols]
  const int32_t* order;   // [slots]
  const int32_t* starts;  // [experts + 1]
  const float* weight;    // [slots] by choice
  void* dh;               // [slots, 2 cols]
  void* weighted;         // [slots, cols] weight a
  float* dweight;         // [slots] by choice; 0 for those without expert
  int64_t slots, cols, experts;
  DType dtype;
};

// starts brought to the host; waits for the stream on CUDA.
struct FetchArgs {
  const int32_t* starts;
  int32_t* out;
  int64_t count;
};
struct ClearArgs {
  void* data;
  int64_t bytes;
};

// Products of each expert's rows, through Host::gemm, one product an expert. On CUDA they need `starts` on the host.
//
// y[slot] = x[slot] w_e^T, or x[slot] w_e.
struct ProjectArgs {
  const void* x;          // [slots, k] without gaps
  const void* w;          // [experts, n, k], or [experts, k, n] when not `transpose`; rows contiguous
  void* y;                // [slots, n] without gaps
  const int32_t* starts;  // [experts + 1]
  int64_t slots, experts, n, k;
  int64_t expert_stride, row_stride;  // of w
  bool transpose;
  DType dtype;
};
// out_e = sum over e's slots of a[slot] b[slot]^T; zero for an expert without slots.
struct WeightGradientArgs {
  const void* a;          // [slots, m] without gaps
  const void* b;          // [slots, n] without gaps
  void* out;              // [experts, m, n]
  const int32_t* starts;  // [experts + 1]
  int64_t experts, m, n;
  DType dtype;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void route(const RouteArgs& args, const Host& host);
void combine(const CombineArgs& args, const Host& host);
void gate_gradient(const GateGradientArgs& args, const Host& host);
void project(const ProjectArgs& args, const Host& host);
void weight_gradient(const WeightGradientArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/fused_moe/variants.inc>

}  // namespace liger::fused_moe
