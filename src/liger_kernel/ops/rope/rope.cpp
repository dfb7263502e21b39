// Selector and explanation of rope.
#include <liger_kernel/ops/rope/plan.h>

namespace liger::rope {

#define LIGER_VARIANTS <liger_kernel/ops/rope/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<RotateArgs>> variants<RotateArgs>();

void rotate(const RotateArgs& a, const Host& host) {
  LIGER_CHECK(a.rotary_dim > 0 && a.rotary_dim % 2 == 0 && a.rotary_dim <= a.head_dim, "rope: rotary_dim is ", a.rotary_dim,
              ", expected an even number in (0, ", a.head_dim, "]");
  LIGER_CHECK(a.input <= Order::kPairs && a.output <= Order::kPairs, "rope: only a table can be shared by the channels of a pair");
  if (a.batch == 0 || a.tokens == 0 || a.q_heads + a.k_heads == 0) return;
  select("rope", variants<RotateArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 5, "rope: the shape has ", p.shape.size(), " numbers, expected batch x tokens x q heads x k heads x head ",
              "dim");
  const int64_t batch = p.shape[0], tokens = p.shape[1], q_heads = p.shape[2], k_heads = p.shape[3], dim = p.shape[4];
  const auto strides = [&](int64_t heads) { return Strides{.batch = tokens * heads * dim, .head = dim, .token = heads * dim}; };
  const TableStrides table{.batch = 0, .token = dim};
  const RotateArgs a{.q = nullptr,
                     .k = nullptr,
                     .cos = nullptr,
                     .sin = nullptr,
                     .q_out = nullptr,
                     .k_out = nullptr,
                     .batch = batch,
                     .tokens = tokens,
                     .q_heads = q_heads,
                     .k_heads = k_heads,
                     .head_dim = dim,
                     .rotary_dim = dim,
                     .q_strides = strides(q_heads),
                     .k_strides = strides(k_heads),
                     .q_out_strides = strides(q_heads),
                     .k_out_strides = strides(k_heads),
                     .cos_strides = table,
                     .sin_strides = table,
                     .dtype = p.dtype,
                     .table_dtype = p.dtype};
  std::string plan = "one token at a time per thread";
  if (p.machine.backend == Backend::kCuda) {
    const int64_t bytes = !reject_width(a, 16) ? 16 : !reject_width(a, 8) ? 8 : size_of(p.dtype);
    plan = describe(choose(a, static_cast<int>(bytes / size_of(p.dtype))), p.dtype);
  }
  return explain_rows("rotate", variants<RotateArgs>(), a, p.machine) + "plan\t" + plan + '\n';
}

std::vector<std::string> all_names() { return names(variants<RotateArgs>()); }

const Registration registration({"rope", "batch x tokens x q heads x k heads x head dim", explain, all_names});

}  // namespace
}  // namespace liger::rope
