// Selector and explanation of tvd.
#include <liger_kernel/ops/tvd/plan.h>

namespace liger::tvd {

#define LIGER_VARIANTS <liger_kernel/ops/tvd/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

// Without elements the total is still written: zero.
void forward(const ForwardArgs& args, const Host& host) {
  if ((args.rows == 0 || args.cols == 0) && !args.total) return;
  ForwardArgs a = args;
  if (!a.labels) {
    join_rows(a.rows, a.cols, {a.input_stride, a.target_stride, a.loss ? a.loss_stride : a.cols, a.grad ? a.grad_stride : a.cols});
  }
  select("tvd", variants<ForwardArgs>(), a, host.machine).run(a, host);
}

void backward(const BackwardArgs& args, const Host& host) {
  if (args.rows == 0 || args.cols == 0) return;
  BackwardArgs a = args;
  if (!a.labels) join_rows(a.rows, a.cols, {a.of_total ? a.cols : a.dy_stride, a.input_stride, a.target_stride, a.grad_stride});
  select("tvd", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "tvd: the shape has ", p.shape.size(), " numbers, expected rows x columns");
  int64_t rows = p.shape[0], cols = p.shape[1];
  join_rows(rows, cols, {cols});
  const ForwardArgs f{.input = nullptr,
                      .target = nullptr,
                      .labels = nullptr,
                      .scale = nullptr,
                      .loss = nullptr,
                      .total = nullptr,
                      .grad = nullptr,
                      .rows = rows,
                      .cols = cols,
                      .input_stride = cols,
                      .target_stride = cols,
                      .loss_stride = cols,
                      .grad_stride = cols,
                      .labels_stride = 1,
                      .dtype = p.dtype,
                      .target_dtype = p.dtype};
  const BackwardArgs b{.dy = nullptr,
                       .of_total = false,
                       .input = nullptr,
                       .target = nullptr,
                       .labels = nullptr,
                       .scale = nullptr,
                       .grad = nullptr,
                       .rows = rows,
                       .cols = cols,
                       .dy_stride = cols,
                       .input_stride = cols,
                       .target_stride = cols,
                       .grad_stride = cols,
                       .labels_stride = 1,
                       .dtype = p.dtype,
                       .target_dtype = p.dtype};
  return explain_rows("forward", variants<ForwardArgs>(), f, p.machine) + explain_rows("backward", variants<BackwardArgs>(), b, p.machine) +
         "plan\t" +
         (p.machine.backend == Backend::kCuda ? describe(cover_pairs(rows, cols, static_cast<int>(16 / size_of(p.dtype))))
                                              : "pieces of at most " + std::to_string(kPairPiece) + " columns, one pass") +
         '\n';
}

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"tvd", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::tvd
