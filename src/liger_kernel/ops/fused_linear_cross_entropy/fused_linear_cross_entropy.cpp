// The chunk loop, the selector and the explanation of fused_linear_cross_entropy.
#include <liger_kernel/ops/fused_linear_cross_entropy/plan.h>

namespace liger::fused_linear_cross_entropy {

constexpr const char* kOp = "fused_linear_cross_entropy";

#define LIGER_VARIANTS <liger_kernel/ops/fused_linear_cross_entropy/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<CompactArgs>> variants<CompactArgs>();
template std::span<const Variant<MoveArgs>> variants<MoveArgs>();
template std::span<const Variant<SumArgs>> variants<SumArgs>();
template std::span<const Variant<SpreadArgs>> variants<SpreadArgs>();

void compact(const CompactArgs& args, const Host& host) {
  if (args.rows > 0) select(kOp, variants<CompactArgs>(), args, host.machine).run(args, host);
}
void move_rows(const MoveArgs& args, const Host& host) {
  if (args.rows > 0 && args.cols > 0) select(kOp, variants<MoveArgs>(), args, host.machine).run(args, host);
}
void column_sums(const SumArgs& args, const Host& host) {
  if (args.cols > 0) select(kOp, variants<SumArgs>(), args, host.machine).run(args, host);
}
void spread(const SpreadArgs& args, const Host& host) {
  if (args.rows > 0) select(kOp, variants<SpreadArgs>(), args, host.machine).run(args, host);
}

namespace {

template <class T>
T* offset(T* p, int64_t elements, DType type) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return p ? static_cast<T*>(reinterpret_cast<Byte*>(p) + elements * size_of(type)) : nullptr;
}

// The loop over chunks, for rows that are all worked on: `a` describes the compacted problem when `row_of` is given, except
// that x and dx are the caller's and reached through `row_of`.
class Loop {
 public:
  Loop(const ForwardArgs& args, const int64_t* row_of, const Plan& plan, const Host& host)
      : a_(args),
        row_of_(row_of),
        p_(plan),
        host_(host),
        stage_x_(row_of || plan.widen),
        stage_dx_(args.dx && (row_of || plan.widen)),
        // A CPU host multiplies and writes one type: products are made in it, then added in fp32.
        add_products_(host.machine.backend == Backend::kCpu && plan.accumulator != plan.compute) {
    const int64_t element = size_of(p_.compute);
    logits_ = host.scratch(p_.chunk_rows * p_.logits_stride * element);
    if (stage_x_) x_ = host.scratch(p_.chunk_rows * a_.hidden * element);
    if (stage_dx_) dx_ = host.scratch(p_.chunk_rows * a_.hidden * element);
    if (p_.widen) weight_ = host.scratch(std::min(p_.block, a_.vocab) * a_.hidden * element);
    if (add_products_ && a_.dw) product_ = host.scratch(product_rows() * a_.hidden * element);
  }

  void run() {
    for (int64_t begin = 0; begin < a_.rows; begin += p_.chunk_rows) chunk(begin, std::min(p_.chunk_rows, a_.rows - begin));
  }

 private:
  int64_t product_rows() const { return std::clamp(kWidenBytes / 2 / a_.hidden, int64_t{64}, std::max<int64_t>(a_.vocab, 64)); }
  int64_t blocks() const { return (a_.vocab + p_.block - 1) / p_.block; }

  struct Block {
    int64_t begin, size;
    const void* weight;
    int64_t stride;
  };
  Block block(int64_t index) const {
    const int64_t begin = index * p_.block, size = std::min(p_.block, a_.vocab - begin);
    const void* weight = offset(a_.weight, begin * a_.weight_stride, a_.dtype);
    if (!p_.widen) return {begin, size, weight, a_.weight_stride};
    move_rows({.src = weight,
               .dst = weight_.data,
               .rows = size,
               .cols = a_.hidden,
               .src_stride = a_.weight_stride,
               .dst_stride = a_.hidden,
               .src_dtype = a_.dtype,
               .dst_dtype = DType::kF32},
              host_);
    return {begin, size, weight_.data, a_.hidden};
  }

  void chunk(int64_t begin, int64_t n) {
    const void* x = offset(a_.x, begin * a_.x_stride, a_.dtype);
    int64_t x_stride = a_.x_stride;
    if (stage_x_) {
      move_rows({.src = row_of_ ? a_.x : x,
                 .dst = x_.data,
                 .src_row = row_of_ ? row_of_ + begin : nullptr,
                 .rows = n,
                 .cols = a_.hidden,
                 .src_stride = a_.x_stride,
                 .dst_stride = a_.hidden,
                 .src_dtype = a_.dtype,
                 .dst_dtype = p_.compute},
                host_);
      x = x_.data, x_stride = a_.hidden;
    }
    // The bias is put there first and the product added to it, so that the sum is rounded once.
    if (a_.bias) {
      move_rows({.src = a_.bias,
                 .dst = logits_.data,
                 .rows = n,
                 .cols = a_.vocab,
                 .src_stride = 0,
                 .dst_stride = p_.logits_stride,
                 .src_dtype = a_.dtype,
                 .dst_dtype = p_.compute},
                host_);
    }
    for (int64_t i = 0; i < blocks(); i++) {
      const Block b = block(i);
      host_.gemm({.a = x,
                  .b = b.weight,
                  .c = offset(logits_.data, b.begin, p_.compute),
                  .m = n,
                  .n = b.size,
                  .k = a_.hidden,
                  .lda = x_stride,
                  .ldb = b.stride,
                  .ldc = p_.logits_stride,
                  .transpose_b = true,
                  .in = p_.compute,
                  .out = p_.compute,
                  .beta = a_.bias ? 1.f : 0.f});
    }
    cross_entropy::forward({.logits = logits_.data,
                            .target = a_.target + begin * a_.target_stride,
                            .class_weight = a_.class_weight,
                            .stats = a_.stats,
                            .row_scale = a_.row_scale ? a_.row_scale + begin : nullptr,
                            .grad = a_.dx || a_.dw || a_.db ? logits_.data : nullptr,
                            .loss = a_.loss + begin,
                            .z_loss = a_.z_loss ? a_.z_loss + begin : nullptr,
                            .hit = a_.hit ? a_.hit + begin : nullptr,
                            .prediction = a_.prediction ? a_.prediction + begin : nullptr,
                            .rows = n,
                            .vocab = a_.vocab,
                            .logits_stride = p_.logits_stride,
                            .grad_stride = p_.logits_stride,
                            .target_stride = a_.target_stride,
                            .dtype = p_.compute,
                            .ignore_index = a_.ignore_index,
                            .label_smoothing = a_.label_smoothing,
                            .lse_square_scale = a_.lse_square_scale,
                            .softcap = a_.softcap,
                            .logit_scale = a_.logit_scale,
                            .mean = a_.mean,
                            .token_scaling = a_.token_scaling},
                           host_);
    if (a_.db) {
      column_sums({.a = logits_.data,
                   .out = a_.db,
                   .rows = n,
                   .cols = a_.vocab,
                   .stride = p_.logits_stride,
                   .dtype = p_.compute,
                   .accumulate = begin > 0},
                  host_);
    }
    if (a_.dx) input_gradient(begin, n);
    if (a_.dw) weight_gradient(begin, n, x, x_stride);
  }

  // dx_c = dz weight, summed over the blocks from the last: where the vocabulary has a short rest, its small product is the one
  // that is rounded in between.
  void input_gradient(int64_t begin, int64_t n) const {
    void* dx = stage_dx_ ? dx_.data : offset(a_.dx, begin * a_.hidden, a_.dtype);
    for (int64_t i = blocks() - 1; i >= 0; i--) {
      const Block b = block(i);
      host_.gemm({.a = offset(logits_.data, b.begin, p_.compute),
                  .b = b.weight,
                  .c = dx,
                  .m = n,
                  .n = a_.hidden,
                  .k = b.size,
                  .lda = p_.logits_stride,
                  .ldb = b.stride,
                  .ldc = a_.hidden,
                  .in = p_.compute,
                  .out = p_.compute,
                  .beta = i + 1 < blocks() ? 1.f : 0.f});
    }
    if (!stage_dx_) return;
    move_rows({.src = dx,
               .dst = row_of_ ? a_.dx : offset(a_.dx, begin * a_.hidden, a_.dtype),
               .dst_row = row_of_ ? row_of_ + begin : nullptr,
               .rows = n,
               .cols = a_.hidden,
               .src_stride = a_.hidden,
               .dst_stride = a_.hidden,
               .src_dtype = p_.compute,
               .dst_dtype = a_.dtype},
              host_);
  }

  void weight_gradient(int64_t begin, int64_t n, const void* x, int64_t x_stride) const {
    const int64_t step = add_products_ ? product_rows() : p_.widen ? a_.vocab : p_.block;
    for (int64_t v = 0; v < a_.vocab; v += step) {
      const int64_t size = std::min(step, a_.vocab - v);
      void* dw = offset(a_.dw, v * a_.hidden, p_.accumulator);
      host_.gemm({.a = offset(logits_.data, v, p_.compute),
                  .b = x,
                  .c = add_products_ ? product_.data : dw,
                  .m = size,
                  .n = a_.hidden,
                  .k = n,
                  .lda = p_.logits_stride,
                  .ldb = x_stride,
                  .ldc = a_.hidden,
                  .transpose_a = true,
                  .in = p_.compute,
                  .out = add_products_ ? p_.compute : p_.accumulator,
                  .beta = begin > 0 && !add_products_ ? 1.f : 0.f});
      if (!add_products_) continue;
      move_rows({.src = product_.data,
                 .dst = dw,
                 .rows = size,
                 .cols = a_.hidden,
                 .src_stride = a_.hidden,
                 .dst_stride = a_.hidden,
                 .src_dtype = p_.compute,
                 .dst_dtype = DType::kF32,
                 .accumulate = begin > 0},
                host_);
    }
  }

  const ForwardArgs& a_;
  const int64_t* const row_of_;
  const Plan& p_;
  const Host& host_;
  const bool stage_x_, stage_dx_, add_products_;
  Scratch logits_, x_, dx_, weight_, product_;
};

// Zero gradients of a call without rows to work on.
void no_rows(const ForwardArgs& a, const Plan& plan, const Host& host) {
  if (a.dw) {
    move_rows({.src = nullptr,
               .dst = a.dw,
               .rows = a.vocab,
               .cols = a.hidden,
               .src_stride = 0,
               .dst_stride = a.hidden,
               .src_dtype = plan.accumulator,
               .dst_dtype = plan.accumulator},
              host);
  }
  if (a.db) {
    move_rows({.src = nullptr,
               .dst = a.db,
               .rows = 1,
               .cols = a.vocab,
               .src_stride = 0,
               .dst_stride = a.vocab,
               .src_dtype = DType::kF32,
               .dst_dtype = DType::kF32},
              host);
  }
}

// One allocation for the per-row arrays of the compacted problem.
struct Rows {
  Scratch memory;
  int64_t used = 0;
  template <class T>
  T* take(int64_t n) {
    char* p = static_cast<char*>(memory.data) + used;
    used += round_up(n * sizeof(T), 16);
    return reinterpret_cast<T*>(p);
  }
};

}  // namespace

void forward(const ForwardArgs& args, const Host& host) {
  LIGER_CHECK(args.hidden > 0 && args.vocab > 0, kOp, ": hidden size ", args.hidden, " and vocabulary ", args.vocab, " must be positive");
  LIGER_CHECK(args.valid_rows <= args.rows, kOp, ": ", args.valid_rows, " valid rows of ", args.rows);
  const Plan plan = choose(args, host.machine, args.dw != nullptr);
  const int64_t valid = args.valid_rows < 0 ? args.rows : args.valid_rows;
  if (valid == 0) no_rows(args, plan, host);
  if (valid == args.rows) return Loop(args, nullptr, plan, host).run();

  Rows scratch{host.scratch((args.rows + valid * 6 + 16) * 8)};
  ForwardArgs a = args;
  int64_t* slot = scratch.take<int64_t>(args.rows);
  int64_t* row_of = scratch.take<int64_t>(valid);
  int64_t* target = scratch.take<int64_t>(valid);
  float* row_scale = args.row_scale ? scratch.take<float>(valid) : nullptr;
  a.target = target, a.target_stride = 1, a.row_scale = row_scale, a.rows = valid;
  a.loss = scratch.take<float>(valid);
  a.z_loss = args.z_loss ? scratch.take<float>(valid) : nullptr;
  a.hit = args.hit ? scratch.take<float>(valid) : nullptr;
  a.prediction = args.prediction ? scratch.take<int64_t>(valid) : nullptr;
  compact({.target = args.target,
           .row_scale = args.row_scale,
           .slot = slot,
           .row_of = row_of,
           .target_out = target,
           .row_scale_out = row_scale,
           .rows = args.rows,
           .valid = valid,
           .target_stride = args.target_stride,
           .ignore_index = args.ignore_index},
          host);
  if (valid > 0) Loop(a, row_of, plan, host).run();
  spread({.slot = slot,
          .loss = a.loss,
          .z_loss = a.z_loss,
          .hit = a.hit,
          .prediction = a.prediction,
          .loss_out = args.loss,
          .z_loss_out = args.z_loss,
          .hit_out = args.hit,
          .prediction_out = args.prediction,
          .dx = args.dx,
          .rows = args.rows,
          .hidden = args.hidden,
          .dtype = args.dtype},
         host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 3, kOp, ": the shape has ", p.shape.size(), " numbers, expected rows x hidden x vocabulary");
  const int64_t rows = p.shape[0], hidden = p.shape[1], vocab = p.shape[2];
  ForwardArgs f{};
  f.rows = rows, f.hidden = hidden, f.vocab = vocab, f.dtype = p.dtype, f.dw_result = p.dtype;
  const Plan plan = choose(f, p.machine, true);
  CompactArgs c{};
  c.rows = c.valid = rows;
  const MoveArgs m{.src = nullptr,
                   .dst = nullptr,
                   .rows = plan.chunk_rows,
                   .cols = hidden,
                   .src_stride = hidden,
                   .dst_stride = hidden,
                   .src_dtype = p.dtype,
                   .dst_dtype = plan.compute};
  const SumArgs s{.a = nullptr,
                  .out = nullptr,
                  .rows = plan.chunk_rows,
                  .cols = vocab,
                  .stride = plan.logits_stride,
                  .dtype = plan.compute,
                  .accumulate = false};
  SpreadArgs d{};
  d.rows = rows, d.hidden = hidden, d.dtype = p.dtype;
  return explain_rows("compact", variants<CompactArgs>(), c, p.machine) + explain_rows("move_rows", variants<MoveArgs>(), m, p.machine) +
         explain_rows("column_sums", variants<SumArgs>(), s, p.machine) + explain_rows("spread", variants<SpreadArgs>(), d, p.machine) +
         "plan\t" + describe(plan) + '\n';
}

std::vector<std::string> all_names() { return names(variants<CompactArgs>(), variants<MoveArgs>()); }

const Registration registration({kOp, "rows x hidden x vocabulary", explain, all_names});

}  // namespace
}  // namespace liger::fused_linear_cross_entropy
