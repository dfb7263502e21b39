// Selector and explanation of kl_div.
#include <liger_kernel/ops/kl_div/plan.h>

namespace liger::kl_div {

#define LIGER_VARIANTS <liger_kernel/ops/kl_div/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

// Without elements the total is still written: zero.
void forward(const ForwardArgs& args, const Host& host) {
  if ((args.rows == 0 || args.cols == 0) && !args.total) return;
  ForwardArgs a = args;
  join_rows(a.rows, a.cols, {a.input_stride, a.target_stride, a.loss ? a.loss_stride : a.cols, a.grad ? a.grad_stride : a.cols});
  select("kl_div", variants<ForwardArgs>(), a, host.machine).run(a, host);
}

void backward(const BackwardArgs& args, const Host& host) {
  if (args.rows == 0 || args.cols == 0) return;
  BackwardArgs a = args;
  join_rows(a.rows, a.cols, {a.of_total ? a.cols : a.dy_stride, a.target_stride, a.grad_stride});
  select("kl_div", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) { return explain_pairs("kl_div", variants<ForwardArgs>(), variants<BackwardArgs>(), p); }

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"kl_div", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::kl_div
