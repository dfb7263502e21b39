// The loops over tiles and chunks, the selector and the explanation of fused_linear_log_probs.
#include <liger_kernel/ops/fused_linear_cross_entropy/fused_linear_cross_entropy.h>
#include <liger_kernel/ops/fused_linear_log_probs/plan.h>

namespace liger::fused_linear_log_probs {

constexpr const char* kOp = "fused_linear_log_probs";
using fused_linear_cross_entropy::column_sums;
using fused_linear_cross_entropy::move_rows;

#define LIGER_VARIANTS <liger_kernel/ops/fused_linear_log_probs/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<StatisticsArgs>> variants<StatisticsArgs>();
template std::span<const Variant<GradientArgs>> variants<GradientArgs>();

void statistics(const StatisticsArgs& args, const Host& host) {
  LIGER_CHECK(args.vocab < int64_t{1} << 31, kOp, ": the vocabulary has ", args.vocab, " entries, at most 2^31 - 1 are supported");
  LIGER_CHECK(args.vocab > 0 || args.rows == 0, kOp, ": the vocabulary is empty");
  if (args.rows > 0) select(kOp, variants<StatisticsArgs>(), args, host.machine).run(args, host);
}
void gradient(const GradientArgs& args, const Host& host) {
  if (args.rows > 0) select(kOp, variants<GradientArgs>(), args, host.machine).run(args, host);
}

namespace {

template <class T>
T* offset(T* p, int64_t elements, DType type) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return p ? static_cast<T*>(reinterpret_cast<Byte*>(p) + elements * size_of(type)) : nullptr;
}

// One type, one layout of `rows` rows of `cols` elements to another.
void convert(const void* src, int64_t src_stride, DType src_dtype, void* dst, int64_t dst_stride, DType dst_dtype, int64_t rows,
             int64_t cols, const Host& host, bool accumulate = false) {
  move_rows({.src = src,
             .dst = dst,
             .rows = rows,
             .cols = cols,
             .src_stride = src_stride,
             .dst_stride = dst_stride,
             .src_dtype = src_dtype,
             .dst_dtype = dst_dtype,
             .accumulate = accumulate},
            host);
}
void clear(void* dst, int64_t rows, int64_t cols, DType dtype, const Host& host) {
  convert(nullptr, 0, dtype, dst, cols, dtype, rows, cols, host);
}

// The products of blocks of the vocabulary with all rows of a problem.
class Products {
 public:
  Products(const Problem& a, const Plan& plan, const Host& host) : a_(a), p_(plan), host_(host) {
    LIGER_CHECK(a.hidden > 0 && a.vocab > 0, kOp, ": hidden size ", a.hidden, " and vocabulary ", a.vocab, " must be positive");
    LIGER_CHECK(a.vocab < int64_t{1} << 31, kOp, ": the vocabulary has ", a.vocab, " entries, at most 2^31 - 1 are supported");
    LIGER_CHECK(a.transform.temperature > 0, kOp, ": temperature is ", a.transform.temperature, ", expected a positive number");
    if (!p_.widen || a.rows == 0) return;
    x_ = host.scratch(a.rows * a.hidden * size_of(p_.compute));
    weight_ = host.scratch(std::min(p_.block, a.vocab) * a.hidden * size_of(p_.compute));
    convert(a.x, a.x_stride, a.dtype, x_.data, a.hidden, p_.compute, a.rows, a.hidden, host);
  }

  struct Block {
    int64_t begin, size;
    const void* weight;
    int64_t stride;
  };
  // body(block) for each in turn; a widened weight is good until the next.
  template <class Body>
  void for_each_block(Body&& body) const {
    for (int64_t begin = 0; begin < a_.vocab;) {
      const int64_t size = block_size(p_, a_.vocab, begin, host_.machine);
      const void* weight = offset(a_.weight, begin * a_.weight_stride, a_.dtype);
      if (p_.widen) convert(weight, a_.weight_stride, a_.dtype, weight_.data, a_.hidden, p_.compute, size, a_.hidden, host_);
      body(Block{begin, size, p_.widen ? weight_.data : weight, p_.widen ? a_.hidden : a_.weight_stride});
      begin += size;
    }
  }

  // z = x weight^T + bias. The bias is put there first and the product added to it, so that the sum is rounded once.
  void logits(const Block& b, void* z) const {
    if (a_.bias) convert(offset(a_.bias, b.begin, a_.dtype), 0, a_.dtype, z, p_.stride, p_.compute, a_.rows, b.size, host_);
    host_.gemm({.a = x(),
                .b = b.weight,
                .c = z,
                .m = a_.rows,
                .n = b.size,
                .k = a_.hidden,
                .lda = x_stride(),
                .ldb = b.stride,
                .ldc = p_.stride,
                .transpose_b = true,
                .in = p_.compute,
                .out = p_.compute,
                .beta = a_.bias ? 1.f : 0.f});
  }

  // dx (+)= dz weight, the block's dw (+)= dz^T x and db (+)= column sums of dz. dx begins with the first block.
  void gradients(const Block& b, const void* dz, const Gradients& g) {
    if (g.dx) {
      product({.a = dz,
               .b = b.weight,
               .c = g.dx,
               .m = a_.rows,
               .n = a_.hidden,
               .k = b.size,
               .lda = p_.stride,
               .ldb = b.stride,
               .ldc = a_.hidden,
               .in = p_.compute,
               .out = DType::kF32,
               .beta = b.begin > 0 ? 1.f : 0.f});
    }
    if (g.dw) {
      product({.a = dz,
               .b = x(),
               .c = offset(g.dw, b.begin * a_.hidden, g.dw_dtype),
               .m = b.size,
               .n = a_.hidden,
               .k = a_.rows,
               .lda = p_.stride,
               .ldb = x_stride(),
               .ldc = a_.hidden,
               .transpose_a = true,
               .in = p_.compute,
               .out = g.dw_dtype,
               .beta = g.add_to_sums ? 1.f : 0.f});
    }
    if (g.db) {
      column_sums({.a = dz,
                   .out = g.db + b.begin,
                   .rows = a_.rows,
                   .cols = b.size,
                   .stride = p_.stride,
                   .dtype = p_.compute,
                   .accumulate = g.add_to_sums},
                  host_);
    }
  }

 private:
  const void* x() const { return p_.widen ? x_.data : a_.x; }
  int64_t x_stride() const { return p_.widen ? a_.hidden : a_.x_stride; }

  // A CPU host multiplies and writes one type: there a result of another type is converted, or added, afterwards, some rows at a time.
  void product(const Gemm& g) {
    if (host_.machine.backend == Backend::kCuda || g.in == g.out) return host_.gemm(g);
    const int64_t row = g.n * size_of(g.in), step = std::clamp(kProductBytes / row, int64_t{64}, std::max<int64_t>(g.m, 64));
    const int64_t bytes = std::min(step, g.m) * row;
    if (bytes > product_bytes_) product_ = {}, product_ = host_.scratch(bytes), product_bytes_ = bytes;
    for (int64_t i = 0; i < g.m; i += step) {
      Gemm part = g;
      part.m = std::min(step, g.m - i);
      part.a = offset(g.a, g.transpose_a ? i : i * g.lda, g.in);
      part.c = product_.data, part.ldc = g.n, part.out = g.in, part.beta = 0;
      host_.gemm(part);
      convert(product_.data, g.n, g.in, offset(g.c, i * g.ldc, g.out), g.ldc, g.out, part.m, g.n, host_, g.beta != 0);
    }
  }

  const Problem& a_;
  const Plan& p_;
  const Host& host_;
  Scratch x_, weight_, product_;
  int64_t product_bytes_ = 0;
};

StatisticsArgs statistics_of(const Problem& a, const Plan& p, const void* z, int64_t first, int64_t cols, RowState* state,
                             const Results& results) {
  return {.logits = z,
          .target = a.target,
          .state = state,
          .results = results,
          .rows = a.rows,
          .cols = cols,
          .first = first,
          .vocab = a.vocab,
          .logits_stride = p.stride,
          .target_stride = a.target_stride,
          .dtype = p.compute,
          .ignore_index = a.ignore_index,
          .transform = a.transform};
}

GradientArgs gradient_of(const Problem& a, const Plan& p, void* z, int64_t first, int64_t cols, const SavedResults& saved,
                         const Upstream& upstream) {
  return {.logits = z,
          .grad = z,
          .target = a.target,
          .saved = saved,
          .upstream = upstream,
          .rows = a.rows,
          .cols = cols,
          .first = first,
          .vocab = a.vocab,
          .logits_stride = p.stride,
          .grad_stride = p.stride,
          .target_stride = a.target_stride,
          .dtype = p.compute,
          .ignore_index = a.ignore_index,
          .transform = a.transform};
}

// Without rows there is nothing to add.
bool no_rows(const Problem& a, const Gradients& g, const Host& host) {
  if (a.rows > 0) return false;
  if (!g.add_to_sums && g.dw) clear(g.dw, a.vocab, a.hidden, g.dw_dtype, host);
  if (!g.add_to_sums && g.db) clear(g.db, 1, a.vocab, DType::kF32, host);
  return true;
}

}  // namespace

void forward(const Problem& a, const Results& results, const Host& host) {
  const Plan plan = choose(a, host.machine, true);
  Products products(a, plan, host);
  if (a.rows == 0) return;
  const Scratch tile = host.scratch(a.rows * plan.stride * size_of(plan.compute));
  const Scratch state = host.scratch(a.rows * sizeof(RowState));
  products.for_each_block([&](const Products::Block& b) {
    products.logits(b, tile.data);
    statistics(statistics_of(a, plan, tile.data, b.begin, b.size, state.as<RowState>(), results), host);
  });
}

void backward(const Problem& a, const SavedResults& saved, const Upstream& upstream, const Gradients& gradients, const Host& host) {
  const Plan plan = choose(a, host.machine, true);
  Products products(a, plan, host);
  if (no_rows(a, gradients, host)) return;
  const Scratch tile = host.scratch(a.rows * plan.stride * size_of(plan.compute));
  products.for_each_block([&](const Products::Block& b) {
    products.logits(b, tile.data);
    gradient(gradient_of(a, plan, tile.data, b.begin, b.size, saved, upstream), host);
    products.gradients(b, tile.data, gradients);
  });
}

int64_t chunk_bytes(const Problem& a, const Machine& machine) {
  const Plan plan = choose(a, machine, false);
  return a.rows * plan.stride * size_of(plan.compute);
}

void chunk_forward(const Problem& a, void* logits, const Results& results, const Host& host) {
  const Plan plan = choose(a, host.machine, false);
  Products products(a, plan, host);
  if (a.rows == 0) return;
  products.for_each_block([&](const Products::Block& b) { products.logits(b, offset(logits, b.begin, plan.compute)); });
  statistics(statistics_of(a, plan, logits, 0, a.vocab, nullptr, results), host);
}

void chunk_backward(const Problem& a, void* logits, const SavedResults& saved, const Upstream& upstream, const Gradients& gradients,
                    const Host& host) {
  LIGER_CHECK(!gradients.add_to_sums || gradients.dw_dtype == DType::kF32, kOp, ": dw is summed in fp32, not in ",
              name(gradients.dw_dtype));
  const Plan plan = choose(a, host.machine, false);
  Products products(a, plan, host);
  if (no_rows(a, gradients, host)) return;
  gradient(gradient_of(a, plan, logits, 0, a.vocab, saved, upstream), host);
  products.for_each_block([&](const Products::Block& b) { products.gradients(b, offset(logits, b.begin, plan.compute), gradients); });
}

namespace {

std::string explain(const liger::Problem& p) {
  LIGER_CHECK(p.shape.size() == 3, kOp, ": the shape has ", p.shape.size(), " numbers, expected rows x hidden x vocabulary");
  Problem a{};
  a.rows = p.shape[0], a.hidden = p.shape[1], a.vocab = p.shape[2], a.dtype = p.dtype;
  const Plan plan = choose(a, p.machine, true);
  const int64_t cols = std::min(plan.block, a.vocab);
  return explain_rows("statistics", variants<StatisticsArgs>(), statistics_of(a, plan, nullptr, 0, cols, nullptr, {}), p.machine) +
         explain_rows("gradient", variants<GradientArgs>(), gradient_of(a, plan, nullptr, 0, cols, {}, {}), p.machine) + "plan\t" +
         describe(plan) + '\n';
}

std::vector<std::string> all_names() { return names(variants<StatisticsArgs>(), variants<GradientArgs>()); }

const Registration registration({kOp, "rows x hidden x vocabulary", explain, all_names});

}  // namespace
}  // namespace liger::fused_linear_log_probs
