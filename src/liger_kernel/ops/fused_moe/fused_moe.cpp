// Selector and explanation of fused_moe, and the products of each expert's rows.
#include <liger_kernel/ops/fused_moe/plan.h>

namespace liger::fused_moe {

#define LIGER_VARIANTS <liger_kernel/ops/fused_moe/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<RouteArgs>> variants<RouteArgs>();
template std::span<const Variant<CombineArgs>> variants<CombineArgs>();
template std::span<const Variant<GateGradientArgs>> variants<GateGradientArgs>();

namespace {

constexpr const char* kOp = "fused_moe";

template <class Args>
void run(const Args& args, const Host& host) {
  select(kOp, variants<Args>(), args, host.machine).run(args, host);
}

const void* offset(const void* p, int64_t elements, DType t) { return static_cast<const char*>(p) + elements * size_of(t); }
void* offset(void* p, int64_t elements, DType t) { return static_cast<char*>(p) + elements * size_of(t); }

std::vector<int32_t> on_host(const int32_t* starts, int64_t experts, const Host& host) {
  std::vector<int32_t> out(static_cast<size_t>(experts) + 1);
  run(FetchArgs{.starts = starts, .out = out.data(), .count = experts + 1}, host);
  return out;
}

}  // namespace

void route(const RouteArgs& args, const Host& host) {
  LIGER_CHECK(args.experts > 0, kOp, ": ", args.experts, " experts, expected at least one");
  LIGER_CHECK(args.slots < int64_t{1} << 31 && args.experts < int64_t{1} << 31, kOp, ": ", args.slots, " choices of ", args.experts,
              " experts, at most 2^31 - 1 of each are supported; split the tokens");
  run(args, host);
}

void combine(const CombineArgs& args, const Host& host) {
  LIGER_CHECK(args.tokens < int64_t{1} << 31, kOp, ": ", args.tokens, " tokens, at most 2^31 - 1 are supported");
  if (args.tokens > 0 && args.cols > 0) run(args, host);
}

void gate_gradient(const GateGradientArgs& args, const Host& host) {
  if (args.slots > 0 && (args.dh || args.weighted || args.dweight)) run(args, host);
}

void project(const ProjectArgs& args, const Host& host) {
  if (args.slots == 0 || args.n == 0) return;
  const std::vector<int32_t> starts = on_host(args.starts, args.experts, host);
  for (int64_t e = 0; e < args.experts; ++e) {
    const int64_t first = starts[e], rows = starts[e + 1] - first;
    if (rows == 0) continue;
    host.gemm({.a = offset(args.x, first * args.k, args.dtype),
               .b = offset(args.w, e * args.expert_stride, args.dtype),
               .c = offset(args.y, first * args.n, args.dtype),
               .m = rows,
               .n = args.n,
               .k = args.k,
               .lda = args.k,
               .ldb = args.row_stride,
               .ldc = args.n,
               .transpose_b = args.transpose,
               .in = args.dtype,
               .out = args.dtype});
  }
}

void weight_gradient(const WeightGradientArgs& args, const Host& host) {
  if (args.m == 0 || args.n == 0) return;
  const std::vector<int32_t> starts = on_host(args.starts, args.experts, host);
  for (int64_t e = 0; e < args.experts; ++e) {
    const int64_t first = starts[e], rows = starts[e + 1] - first;
    void* out = offset(args.out, e * args.m * args.n, args.dtype);
    if (rows == 0) {
      run(ClearArgs{.data = out, .bytes = args.m * args.n * size_of(args.dtype)}, host);
      continue;
    }
    host.gemm({.a = offset(args.a, first * args.m, args.dtype),
               .b = offset(args.b, first * args.n, args.dtype),
               .c = out,
               .m = args.m,
               .n = args.n,
               .k = rows,
               .lda = args.m,
               .ldb = args.n,
               .ldc = args.n,
               .transpose_a = true,
               .in = args.dtype,
               .out = args.dtype});
  }
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 5, kOp, ": the shape has ", p.shape.size(),
              " numbers, expected tokens x hidden x intermediate x experts x experts per token");
  const int64_t tokens = p.shape[0], hidden = p.shape[1], intermediate = p.shape[2], experts = p.shape[3], top_k = p.shape[4];
  RouteArgs r{};
  r.slots = tokens * top_k, r.experts = experts, r.top_k = top_k;
  CombineArgs c{};
  c.tokens = tokens, c.top_k = top_k, c.cols = hidden, c.experts = experts, c.dtype = p.dtype;
  GateGradientArgs g{};
  g.slots = tokens * top_k, g.cols = intermediate, g.experts = experts, g.dtype = p.dtype;
  return explain_rows("route", variants<RouteArgs>(), r, p.machine) + explain_rows("combine", variants<CombineArgs>(), c, p.machine) +
         explain_rows("gate_gradient", variants<GateGradientArgs>(), g, p.machine) + "plan\t" + std::to_string(tokens * top_k) +
         " rows sorted by expert, 2 products forward and 4 backward" +
         (p.machine.backend == Backend::kCuda ? "; bf16 inside PyTorch: each one grouped product, else one per expert"
                                              : ", each one product per expert") +
         '\n';
}

std::vector<std::string> all_names() { return names(variants<RouteArgs>(), variants<CombineArgs>(), variants<GateGradientArgs>()); }

const Registration registration({kOp, "tokens x hidden x intermediate x experts x experts per token", explain, all_names});

}  // namespace
}  // namespace liger::fused_moe
