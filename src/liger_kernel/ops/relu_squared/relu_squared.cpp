// Selector and explanation of relu_squared.
#include <liger_kernel/ops/relu_squared/plan.h>

namespace liger::relu_squared {

#define LIGER_VARIANTS <liger_kernel/ops/relu_squared/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

void forward(const ForwardArgs& args, const Host& host) {
  if (args.rows == 0 || args.cols == 0) return;
  ForwardArgs a = args;
  join_rows(a.rows, a.cols, {a.x_stride, a.y_stride});
  select("relu_squared", variants<ForwardArgs>(), a, host.machine).run(a, host);
}

void backward(const BackwardArgs& args, const Host& host) {
  if (args.rows == 0 || args.cols == 0) return;
  BackwardArgs a = args;
  join_rows(a.rows, a.cols, {a.dy_stride, a.x_stride, a.dx_stride});
  select("relu_squared", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) { return explain_gated("relu_squared", variants<ForwardArgs>(), variants<BackwardArgs>(), p); }

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"relu_squared", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::relu_squared
