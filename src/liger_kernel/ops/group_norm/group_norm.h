// GroupNorm (Wu & He 2018) of [batch, channels, spatial]: statistics over the channels of a group and all of space, weight and bias
// for each channel. With n = channels / groups * spatial elements in a group of a sample:
//
//   mean, rstd = 1 / sqrt(variance + eps)    hat = (x - mean) rstd      y = hat weight + bias
//   g  = dy weight                           dx  = rstd (g - mean(g) - hat mean(g hat))
//   dw = sum over batch and space of dy hat  db  = sum over batch and space of dy
//
// Everything is fp32 and rounded once at the store. All matrices are contiguous: a group is n consecutive elements, and a plane
// (one channel of one sample) `spatial` of them.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::group_norm {

struct ForwardArgs {
  const void* x;                             // [batch, channels, spatial]
  const void* weight;                        // [channels]
  const void* bias;                          // [channels]
  void* y;                                   // [batch, channels, spatial], x's type
  float* mean;                               // [batch, groups]
  float* rstd;                               // [batch, groups]
  int64_t batch, channels, spatial, groups;  // groups divides channels
  DType dtype, weight_dtype, bias_dtype;
  float eps;
};

struct BackwardArgs {
  const void* dy;      // [batch, channels, spatial], x's type
  const void* x;       // [batch, channels, spatial]
  const void* weight;  // [channels]
  const float* mean;   // [batch, groups]
  const float* rstd;   // [batch, groups]
  void* dx;            // [batch, channels, spatial]; nullptr: not wanted
  void* dw;            // [channels], weight's type; nullptr: not wanted
  void* db;            // [channels], bias's type; nullptr: not wanted
  int64_t batch, channels, spatial, groups;
  DType dtype, weight_dtype, bias_dtype;
};

// Run the first variant of variants.inc that accepts. Throw liger::Error when none does.
void forward(const ForwardArgs& args, const Host& host);
void backward(const BackwardArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/group_norm/variants.inc>

}  // namespace liger::group_norm
