// The chunk loop, the selector and the explanation of fused_linear_jsd.
#include <optional>

#include <liger_kernel/ops/fused_linear_cross_entropy/fused_linear_cross_entropy.h>
#include <liger_kernel/ops/fused_linear_jsd/plan.h>

namespace liger::fused_linear_jsd {

using fused_linear_cross_entropy::column_sums;
using fused_linear_cross_entropy::compact;
using fused_linear_cross_entropy::move_rows;
using fused_linear_cross_entropy::spread;

#define LIGER_VARIANTS <liger_kernel/ops/fused_linear_jsd/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<DivergenceArgs>> variants<DivergenceArgs>();

void divergence(const DivergenceArgs& args, const Host& host) {
  LIGER_CHECK(args.loss.temperature > 0, kOp, ": temperature is ", args.loss.temperature, ", expected a positive number");
  LIGER_CHECK(args.loss.divergence != Divergence::kJensenShannon || (args.loss.beta >= 0 && args.loss.beta <= 1), kOp, ": beta is ",
              args.loss.beta, ", expected a number in [0, 1]");
  LIGER_CHECK(args.teacher_vocab >= args.vocab, kOp, ": the teacher's vocabulary has ", args.teacher_vocab, " entries, the student's ",
              args.vocab, "; the teacher's must not be smaller");
  LIGER_CHECK(args.teacher_vocab < int64_t{1} << 31, kOp, ": the vocabulary has ", args.teacher_vocab,
              " entries, at most 2^31 - 1 are supported");
  if (args.rows > 0) select(kOp, variants<DivergenceArgs>(), args, host.machine).run(args, host);
}

namespace {

template <class T>
T* offset(T* p, int64_t elements, DType type) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return p ? static_cast<T*>(reinterpret_cast<Byte*>(p) + elements * size_of(type)) : nullptr;
}

// A head with its scratch: the rows of a chunk, its logits, and a block of weight where that is widened.
class Logits {
 public:
  Logits(const Head& head, const int64_t* row_of, DType dtype, const Plan& plan, const Host& host)
      : h_(head),
        row_of_(row_of),
        dtype_(dtype),
        p_(plan),
        host_(host),
        stride_(logits_stride(head.vocab)),
        block_(block_of(head, plan, host.machine)),
        stage_(row_of || plan.widen) {
    const int64_t element = size_of(p_.compute);
    data_ = host.scratch(p_.chunk_rows * stride_ * element);
    if (stage_) x_scratch_ = host.scratch(p_.chunk_rows * h_.hidden * element);
    if (p_.widen) weight_ = host.scratch(std::min(block_, h_.vocab) * h_.hidden * element);
  }

  struct Block {
    int64_t begin, size;
    const void* weight;
    int64_t stride;
  };
  int64_t blocks() const { return (h_.vocab + block_ - 1) / block_; }
  Block block(int64_t index) const {  // a widened weight is good until the next
    const int64_t begin = index * block_, size = std::min(block_, h_.vocab - begin);
    const void* weight = offset(h_.weight, begin * h_.weight_stride, dtype_);
    if (!p_.widen) return {begin, size, weight, h_.weight_stride};
    copy(weight, h_.weight_stride, weight_.data, size, h_.hidden);
    return {begin, size, weight_.data, h_.hidden};
  }

  // The logits of rows [begin, begin + n).
  void fill(int64_t begin, int64_t n) {
    const void* rows = offset(h_.x, begin * h_.x_stride, dtype_);
    x = rows, x_stride = h_.x_stride;
    if (stage_) {
      copy(row_of_ ? h_.x : rows, h_.x_stride, x_scratch_.data, n, h_.hidden, row_of_ ? row_of_ + begin : nullptr);
      x = x_scratch_.data, x_stride = h_.hidden;
    }
    // The bias is put there first and the product added to it, so that the sum is rounded once.
    if (h_.bias) copy(h_.bias, 0, data_.data, n, h_.vocab, nullptr, stride_);
    for (int64_t i = 0; i < blocks(); i++) {
      const Block b = block(i);
      host_.gemm({.a = x,
                  .b = b.weight,
                  .c = at(b.begin),
                  .m = n,
                  .n = b.size,
                  .k = h_.hidden,
                  .lda = x_stride,
                  .ldb = b.stride,
                  .ldc = stride_,
                  .transpose_b = true,
                  .in = p_.compute,
                  .out = p_.compute,
                  .beta = h_.bias ? 1.f : 0.f});
    }
  }

  void* at(int64_t column) const { return offset(data_.data, column, p_.compute); }
  int64_t stride() const { return stride_; }
  bool staged() const { return stage_; }

  const void* x = nullptr;  // of the rows filled last, in the products' type
  int64_t x_stride = 0;

 private:
  void copy(const void* src, int64_t src_stride, void* dst, int64_t rows, int64_t cols, const int64_t* src_row = nullptr,
            int64_t dst_stride = 0) const {
    move_rows({.src = src,
               .dst = dst,
               .src_row = src_row,
               .rows = rows,
               .cols = cols,
               .src_stride = src_stride,
               .dst_stride = dst_stride ? dst_stride : cols,
               .src_dtype = dtype_,
               .dst_dtype = p_.compute},
              host_);
  }

  const Head& h_;
  const int64_t* const row_of_;
  const DType dtype_;
  const Plan& p_;
  const Host& host_;
  const int64_t stride_, block_;
  const bool stage_;
  Scratch data_, x_scratch_, weight_;
};

// The loop over chunks, for rows that are all worked on: `a` describes the compacted problem when `row_of` is given, except that the
// inputs, the probabilities and dx are the caller's and reached through `row_of`.
class Loop {
 public:
  Loop(const ForwardArgs& args, const int64_t* row_of, const Plan& plan, const Host& host)
      : a_(args),
        row_of_(row_of),
        p_(plan),
        host_(host),
        probabilities_(args.loss.divergence == Divergence::kProbabilities),
        // A CPU host multiplies and writes one type: products are made in it, then added in fp32.
        add_products_(host.machine.backend == Backend::kCpu && plan.accumulator != plan.compute),
        student_(args.student, row_of, args.dtype, plan, host) {
    if (!probabilities_) teacher_.emplace(args.teacher, row_of, args.dtype, plan, host);
    const int64_t element = size_of(p_.compute);
    if (a_.dx && student_.staged()) dx_ = host.scratch(p_.chunk_rows * hidden() * element);
    if (add_products_ && a_.dw) product_ = host.scratch(product_rows() * hidden() * element);
  }

  void run() {
    for (int64_t begin = 0; begin < a_.rows; begin += p_.chunk_rows) chunk(begin, std::min(p_.chunk_rows, a_.rows - begin));
  }

 private:
  int64_t hidden() const { return a_.student.hidden; }
  int64_t vocab() const { return a_.student.vocab; }
  int64_t product_rows() const { return std::clamp(kWidenBytes / 2 / hidden(), int64_t{64}, std::max<int64_t>(vocab(), 64)); }

  void chunk(int64_t begin, int64_t n) {
    student_.fill(begin, n);
    if (teacher_) teacher_->fill(begin, n);
    const int64_t first = row_of_ ? 0 : begin;  // of the probabilities, which are reached through row_of
    divergence({.student = student_.at(0),
                .teacher = probabilities_ ? offset(a_.teacher.x, first * a_.teacher.x_stride, a_.probability_dtype) : teacher_->at(0),
                .teacher_row = probabilities_ && row_of_ ? row_of_ + begin : nullptr,
                .target = a_.target ? a_.target + begin * a_.target_stride : nullptr,
                .stats = a_.stats,
                .soft = a_.soft + begin,
                .hard = a_.hard ? a_.hard + begin : nullptr,
                .rows = n,
                .vocab = vocab(),
                .teacher_vocab = probabilities_ ? vocab() : a_.teacher.vocab,
                .student_stride = student_.stride(),
                .teacher_stride = probabilities_ ? a_.teacher.x_stride : teacher_->stride(),
                .target_stride = a_.target_stride,
                .dtype = p_.compute,
                .teacher_dtype = probabilities_ ? a_.probability_dtype : p_.compute,
                .ignore_index = a_.ignore_index,
                .loss = a_.loss,
                .gradient = a_.dx || a_.dw || a_.db},
               host_);
    if (a_.db) {
      column_sums({.a = student_.at(0),
                   .out = a_.db,
                   .rows = n,
                   .cols = vocab(),
                   .stride = student_.stride(),
                   .dtype = p_.compute,
                   .accumulate = begin > 0},
                  host_);
    }
    if (a_.dx) input_gradient(begin, n);
    if (a_.dw) weight_gradient(begin, n);
  }

  // dx_c = ds weight, summed over the blocks from the last: where the vocabulary has a short rest, its small product is the one that is
  // rounded in between.
  void input_gradient(int64_t begin, int64_t n) const {
    void* dx = student_.staged() ? dx_.data : offset(a_.dx, begin * hidden(), a_.dtype);
    for (int64_t i = student_.blocks() - 1; i >= 0; i--) {
      const Logits::Block b = student_.block(i);
      host_.gemm({.a = student_.at(b.begin),
                  .b = b.weight,
                  .c = dx,
                  .m = n,
                  .n = hidden(),
                  .k = b.size,
                  .lda = student_.stride(),
                  .ldb = b.stride,
                  .ldc = hidden(),
                  .in = p_.compute,
                  .out = p_.compute,
                  .beta = i + 1 < student_.blocks() ? 1.f : 0.f});
    }
    if (!student_.staged()) return;
    move_rows({.src = dx,
               .dst = row_of_ ? a_.dx : offset(a_.dx, begin * hidden(), a_.dtype),
               .dst_row = row_of_ ? row_of_ + begin : nullptr,
               .rows = n,
               .cols = hidden(),
               .src_stride = hidden(),
               .dst_stride = hidden(),
               .src_dtype = p_.compute,
               .dst_dtype = a_.dtype},
              host_);
  }

  void weight_gradient(int64_t begin, int64_t n) const {
    const int64_t block = host_.machine.backend == Backend::kCuda ? block_of(a_.student, p_, host_.machine) : vocab();
    const int64_t step = add_products_ ? product_rows() : block;
    for (int64_t v = 0; v < vocab(); v += step) {
      const int64_t size = std::min(step, vocab() - v);
      void* dw = offset(a_.dw, v * hidden(), p_.accumulator);
      host_.gemm({.a = student_.at(v),
                  .b = student_.x,
                  .c = add_products_ ? product_.data : dw,
                  .m = size,
                  .n = hidden(),
                  .k = n,
                  .lda = student_.stride(),
                  .ldb = student_.x_stride,
                  .ldc = hidden(),
                  .transpose_a = true,
                  .in = p_.compute,
                  .out = add_products_ ? p_.compute : p_.accumulator,
                  .beta = begin > 0 && !add_products_ ? 1.f : 0.f});
      if (!add_products_) continue;
      move_rows({.src = product_.data,
                 .dst = dw,
                 .rows = size,
                 .cols = hidden(),
                 .src_stride = hidden(),
                 .dst_stride = hidden(),
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
  const bool probabilities_, add_products_;
  Logits student_;
  std::optional<Logits> teacher_;
  Scratch dx_, product_;
};

void clear(void* dst, int64_t rows, int64_t cols, DType dtype, const Host& host) {
  move_rows(
      {.src = nullptr, .dst = dst, .rows = rows, .cols = cols, .src_stride = 0, .dst_stride = cols, .src_dtype = dtype, .dst_dtype = dtype},
      host);
}

}  // namespace

void forward(const ForwardArgs& args, const Host& host) {
  const bool probabilities = args.loss.divergence == Divergence::kProbabilities;
  for (const Head* head : {&args.student, &args.teacher}) {
    if (head == &args.teacher && probabilities) continue;
    LIGER_CHECK(head->hidden > 0 && head->vocab > 0, kOp, ": hidden size ", head->hidden, " and vocabulary ", head->vocab,
                " must be positive");
  }
  LIGER_CHECK(args.valid_rows <= args.rows, kOp, ": ", args.valid_rows, " valid rows of ", args.rows);
  LIGER_CHECK(args.target || args.rows == 0 || (args.valid_rows < 0 && !args.hard), kOp, ": ignored rows and a hard loss need labels");
  const Plan plan = choose(args, host.machine, args.dw != nullptr);
  const int64_t valid = args.valid_rows < 0 ? args.rows : args.valid_rows;
  if (valid == 0) {
    if (args.dw) clear(args.dw, args.student.vocab, args.student.hidden, plan.accumulator, host);
    if (args.db) clear(args.db, 1, args.student.vocab, DType::kF32, host);
  }
  if (valid == args.rows) {
    if (valid > 0) Loop(args, nullptr, plan, host).run();
    return;
  }

  // Per row: its place among those worked on; per place: row, label, soft and hard loss.
  const Scratch memory = host.scratch((args.rows + valid * 4) * 8);
  int64_t* slot = memory.as<int64_t>();
  int64_t *row_of = slot + args.rows, *target = row_of + valid;
  float *soft = reinterpret_cast<float*>(target + valid), *hard = soft + valid;
  ForwardArgs a = args;
  a.target = target, a.target_stride = 1, a.rows = valid, a.soft = soft, a.hard = args.hard ? hard : nullptr;
  compact({.target = args.target,
           .row_scale = nullptr,
           .slot = slot,
           .row_of = row_of,
           .target_out = target,
           .row_scale_out = nullptr,
           .rows = args.rows,
           .valid = valid,
           .target_stride = args.target_stride,
           .ignore_index = args.ignore_index},
          host);
  if (valid > 0) Loop(a, row_of, plan, host).run();
  spread({.slot = slot,
          .loss = a.soft,
          .z_loss = a.hard,
          .hit = nullptr,
          .prediction = nullptr,
          .loss_out = args.soft,
          .z_loss_out = args.hard,
          .hit_out = nullptr,
          .prediction_out = nullptr,
          .dx = args.dx,
          .rows = args.rows,
          .hidden = args.student.hidden,
          .dtype = args.dtype},
         host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 3, kOp, ": the shape has ", p.shape.size(), " numbers, expected rows x hidden x vocabulary");
  ForwardArgs f{};
  f.rows = p.shape[0], f.student.hidden = f.teacher.hidden = p.shape[1], f.student.vocab = f.teacher.vocab = p.shape[2];
  f.dtype = f.dw_result = p.dtype;
  const Plan plan = choose(f, p.machine, true);
  DivergenceArgs d{};
  d.rows = plan.chunk_rows, d.vocab = d.teacher_vocab = p.shape[2];
  d.student_stride = d.teacher_stride = logits_stride(d.vocab), d.dtype = d.teacher_dtype = plan.compute;
  std::string row = p.machine.backend == Backend::kCuda ? "a block a row, three passes" : "one row at a time per thread";
  if (p.machine.backend == Backend::kCuda && p.machine.floor >= 90 && !reject_read_once(d, p.machine)) {
    const ReadOnce r = choose_read_once(d, p.machine);
    row = "rows read once by clusters of " + std::to_string(r.cluster) + " blocks, " + std::to_string(r.slice * 32) +
          " bytes of shared memory each";
  }
  return explain_rows("divergence", variants<DivergenceArgs>(), d, p.machine) + "plan\t" + describe(plan) + "; " + row + '\n';
}

std::vector<std::string> all_names() { return names(variants<DivergenceArgs>()); }

const Registration registration({kOp, "rows x hidden x vocabulary", explain, all_names});

}  // namespace
}  // namespace liger::fused_linear_jsd
