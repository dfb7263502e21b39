// Rotary position embedding of q and k at once (Su et al. 2021). The first `rotary_dim` = r channels of a head form r/2 pairs
// (x1, x2); pair i of token t is turned by the angle whose cosine and sine the table holds, the other channels are copied:
//
//   y1 = x1 * cos1 - x2 * sin1        y2 = x2 * cos2 + x1 * sin2
//
// (cos1, sin1) and (cos2, sin2) are the table's values for the pair's two channels; in a true rotation they are equal. The
// backward pass is the transpose, and needs neither q nor k:
//
//   dx1 = dy1 * cos1 + dy2 * sin2     dx2 = dy2 * cos2 - dy1 * sin1
//
// `inverse` asks for it. Arithmetic is fp32, one rounding at the store. Outputs may not overlap inputs.
#pragma once
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger::rope {

// Where the two channels of pair i lie within the first r channels of a head, or their two values in a table row.
enum class Order : int8_t {
  kHalves = 0,   // i and i + r/2
  kPairs = 1,    // 2i and 2i + 1
  kShared = 2,   // tables only: r/2 columns, column i for both
  kComplex = 3,  // tables only: cos holds r/2 complex numbers, column 2i the cosine and 2i + 1 the sine for both; sin is unused
};
constexpr bool interleaved(Order order) { return order == Order::kPairs || order == Order::kComplex; }

// In elements; the last dimension has stride 1.
struct Strides {
  int64_t batch, head, token;
};
struct TableStrides {
  int64_t batch, token;  // batch 0: one table for all samples
};

struct RotateArgs {
  const void* q;                                                  // [batch, q_heads, tokens, head_dim]
  const void* k;                                                  // [batch, k_heads, tokens, head_dim], q's type
  const void* cos;                                                // [batch, tokens, r], or r/2 columns where `table` is kShared
  const void* sin;                                                // like cos
  void* q_out;                                                    // like q
  void* k_out;                                                    // like k
  int64_t batch, tokens, q_heads, k_heads, head_dim, rotary_dim;  // head counts may be 0
  Strides q_strides, k_strides, q_out_strides, k_out_strides;
  TableStrides cos_strides, sin_strides;
  DType dtype, table_dtype;
  Order input = Order::kHalves, output = Order::kHalves, table = Order::kHalves;
  bool inverse = false;
};

// Runs the first variant of variants.inc that accepts. Throws liger::Error when none does.
void rotate(const RotateArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/rope/variants.inc>

}  // namespace liger::rope
