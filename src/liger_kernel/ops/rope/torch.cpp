// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/rope/rope.h>

namespace liger::rope {
namespace {

// q and k are [batch, heads, tokens, head_dim] (heads_dim 1) or [batch, tokens, heads, head_dim] (heads_dim 2).
struct Axes {
  int heads, tokens;
};

Order order_of(const char* what, int64_t order, bool table) {
  LIGER_CHECK(order >= 0 && order <= (table ? 3 : 1), "rope: ", what, " is ", order, ", expected 0 (halves)",
              table ? ", 1 (pairs), 2 (shared) or 3 (complex)" : " or 1 (pairs)");
  return static_cast<Order>(order);
}

TableStrides table_strides_of(const Tensor& t) { return {.batch = t.size(0) == 1 ? 0 : t.stride(0), .token = t.stride(1)}; }

Strides strides_of(const Tensor& t, Axes axes) {
  return {.batch = t.stride(0), .head = t.stride(axes.heads), .token = t.stride(axes.tokens)};
}

void check_last(const char* what, const Tensor& t, int64_t d) {
  LIGER_CHECK(t.size(d) <= 1 || t.numel() == 0 || t.stride(d) == 1, "rope: ", what, " has stride ", t.stride(d),
              " in its last dimension, expected 1");
}

void check_heads(const char* what, const Tensor& t) {
  LIGER_CHECK(t.dim() == 4, "rope: ", what, " has ", t.dim(), " dimensions, expected 4: batch, heads, tokens and head_dim");
  check_last(what, t, 3);
}

void check_table(const char* what, const Tensor& t, const Tensor& q, Axes axes, int64_t columns) {
  const bool fits = t.dim() == 3 && (t.size(0) == 1 || t.size(0) == q.size(0)) && t.size(1) == q.size(axes.tokens) && t.size(2) == columns;
  LIGER_CHECK(fits, "rope: ", what, " does not have the shape [1 or ", q.size(0), ", ", q.size(axes.tokens), ", ", columns,
              "]: batch, tokens, columns of the table");
  check_last(what, t, 2);
}

// Dense, of t's shape. Tokens outside heads in memory is the layout that projections and attention kernels use.
Tensor empty_heads(const Tensor& t, Axes axes, bool tokens_outer) {
  std::vector<int64_t> sizes(4), strides(4);
  for (int d = 0; d < 4; d++) sizes[d] = t.size(d);
  const int inner = tokens_outer ? axes.heads : axes.tokens, outer = tokens_outer ? axes.tokens : axes.heads;
  strides[3] = 1;
  strides[inner] = sizes[3];
  strides[outer] = sizes[inner] * strides[inner];
  strides[0] = sizes[outer] * strides[outer];
  using torch::stable::detail::from;
  std::array<StableIValue, 7> stack{from(t),
                                    from(torch::headeronly::IntHeaderOnlyArrayRef(sizes)),
                                    from(torch::headeronly::IntHeaderOnlyArrayRef(strides)),
                                    from(std::optional<ScalarType>()),
                                    from(std::optional<torch::headeronly::Layout>()),
                                    from(std::optional<torch::stable::Device>()),
                                    from(std::optional<bool>())};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::new_empty_strided", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// q, k as in Axes; cos, sin [1 or batch, tokens, r, or r/2 when shared]; sin is not read when complex
// -> q', k' in memory of their own
std::tuple<Tensor, Tensor> rotate_torch(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, int64_t heads_dim,
                                        int64_t rotary_dim, int64_t input, int64_t output, int64_t table, bool inverse, bool q_tokens_outer,
                                        bool k_tokens_outer) {
  LIGER_CHECK(heads_dim == 1 || heads_dim == 2, "rope: heads_dim is ", heads_dim, ", expected 1 or 2");
  const Axes axes{.heads = static_cast<int>(heads_dim), .tokens = static_cast<int>(3 - heads_dim)};
  check_devices("rope", q, k, cos, sin);
  check_heads("q", q);
  check_heads("k", k);
  LIGER_CHECK(k.size(0) == q.size(0) && k.size(axes.tokens) == q.size(axes.tokens) && k.size(3) == q.size(3),
              "rope: q and k differ in batch, tokens or head_dim: ", q.size(0), ", ", q.size(axes.tokens), ", ", q.size(3), " and ",
              k.size(0), ", ", k.size(axes.tokens), ", ", k.size(3));
  const Order table_order = order_of("table", table, true);
  const int64_t columns = table_order == Order::kShared ? rotary_dim / 2 : rotary_dim;
  check_table("cos", cos, q, axes, columns);
  check_table("sin", sin, q, axes, columns);
  check_dtypes("rope", "sin", sin, "cos", cos);

  const TorchHost host(q);
  const Tensor q_out = empty_heads(q, axes, q_tokens_outer), k_out = empty_heads(k, axes, k_tokens_outer);
  RotateArgs args{.q = const_data(q),
                  .k = const_data(k),
                  .cos = const_data(cos),
                  .sin = const_data(sin),
                  .q_out = data(q_out),
                  .k_out = data(k_out),
                  .batch = q.size(0),
                  .tokens = q.size(axes.tokens),
                  .q_heads = q.size(axes.heads),
                  .k_heads = k.size(axes.heads),
                  .head_dim = q.size(3),
                  .rotary_dim = rotary_dim,
                  .q_strides = strides_of(q, axes),
                  .k_strides = strides_of(k, axes),
                  .q_out_strides = strides_of(q_out, axes),
                  .k_out_strides = strides_of(k_out, axes),
                  .cos_strides = table_strides_of(cos),
                  .sin_strides = table_strides_of(sin),
                  .dtype = dtype_of("rope", q),
                  .table_dtype = dtype_of("rope", cos),
                  .input = order_of("input", input, false),
                  .output = order_of("output", output, false),
                  .table = table_order,
                  .inverse = inverse};
  if (q.scalar_type() == k.scalar_type()) {
    rotate(args, host);
  } else {  // one launch each
    RotateArgs rest = args;
    args.k_heads = rest.q_heads = 0;
    rest.dtype = dtype_of("rope", k);
    rotate(args, host);
    rotate(rest, host);
  }
  return {q_out, k_out};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def(
      "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, int heads_dim, int rotary_dim, int input, int output, int table, bool inverse,"
      " bool q_tokens_outer, bool k_tokens_outer) -> (Tensor q_out, Tensor k_out)");
}

#define LIGER_REGISTER(key) \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) { m.impl("rope", TORCH_BOX(&rotate_torch)); }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::rope
