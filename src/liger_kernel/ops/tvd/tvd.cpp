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

std::string explain(const Problem& p) { return explain_pairs("tvd", variants<ForwardArgs>(), variants<BackwardArgs>(), p); }

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"tvd", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::tvd
