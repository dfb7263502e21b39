// Selector and explanation of cross_entropy.
#include <liger_kernel/ops/cross_entropy/plan.h>

namespace liger::cross_entropy {

#define LIGER_VARIANTS <liger_kernel/ops/cross_entropy/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<StatsArgs>> variants<StatsArgs>();
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<TotalsArgs>> variants<TotalsArgs>();
template std::span<const Variant<ScaleArgs>> variants<ScaleArgs>();

void label_stats(const StatsArgs& args, const Host& host) {
  select("cross_entropy", variants<StatsArgs>(), args, host.machine).run(args, host);
}

void forward(const ForwardArgs& args, const Host& host) {
  LIGER_CHECK(args.vocab < int64_t{1} << 31, "cross_entropy: the vocabulary has ", args.vocab, " entries, at most 2^31 - 1 are supported");
  LIGER_CHECK(args.vocab > 0 || args.rows == 0, "cross_entropy: the vocabulary is empty");
  if (args.rows > 0) select("cross_entropy", variants<ForwardArgs>(), args, host.machine).run(args, host);
}

void totals(const TotalsArgs& args, const Host& host) {
  select("cross_entropy", variants<TotalsArgs>(), args, host.machine).run(args, host);
}

void scale(const ScaleArgs& args, const Host& host) {
  if (args.rows > 0 && args.vocab > 0) select("cross_entropy", variants<ScaleArgs>(), args, host.machine).run(args, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "cross_entropy: the shape has ", p.shape.size(), " numbers, expected rows x vocabulary");
  const int64_t rows = p.shape[0], vocab = p.shape[1];
  const StatsArgs s{.target = nullptr, .class_weight = nullptr, .stats = nullptr, .rows = rows, .vocab = vocab, .target_stride = 1};
  const ForwardArgs f{.logits = nullptr,
                      .target = nullptr,
                      .class_weight = nullptr,
                      .stats = nullptr,
                      .row_scale = nullptr,
                      .grad = nullptr,
                      .loss = nullptr,
                      .z_loss = nullptr,
                      .hit = nullptr,
                      .prediction = nullptr,
                      .rows = rows,
                      .vocab = vocab,
                      .logits_stride = vocab,
                      .grad_stride = vocab,
                      .target_stride = 1,
                      .dtype = p.dtype};
  const TotalsArgs t{.loss = nullptr,
                     .z_loss = nullptr,
                     .hit = nullptr,
                     .stats = nullptr,
                     .total = nullptr,
                     .z_total = nullptr,
                     .accuracy = nullptr,
                     .rows = rows,
                     .dtype = p.dtype};
  const ScaleArgs g{.grad = nullptr,
                    .grad_out = nullptr,
                    .factor = nullptr,
                    .factor_dtype = DType::kF32,
                    .per_row = false,
                    .rows = rows,
                    .vocab = vocab,
                    .grad_stride = vocab,
                    .out_stride = vocab,
                    .dtype = p.dtype};
  std::string plan = "one row at a time per thread";
  if (p.machine.backend == Backend::kCuda) {
    plan = p.machine.floor >= 90 && !reject_read_once(f, p.machine)
               ? describe(choose_read_once(f, p.machine.shared_memory))
               : "one block of " + std::to_string(two_pass_threads(vocab, p.dtype)) + " threads a row, two passes";
  }
  return explain_rows("label_stats", variants<StatsArgs>(), s, p.machine) + explain_rows("forward", variants<ForwardArgs>(), f, p.machine) +
         explain_rows("totals", variants<TotalsArgs>(), t, p.machine) + explain_rows("scale", variants<ScaleArgs>(), g, p.machine) +
         "plan\t" + plan + '\n';
}

std::vector<std::string> all_names() {
  return names(variants<ForwardArgs>(), variants<StatsArgs>(), variants<TotalsArgs>(), variants<ScaleArgs>());
}

const Registration registration({"cross_entropy", "rows x vocabulary", explain, all_names});

}  // namespace
}  // namespace liger::cross_entropy
