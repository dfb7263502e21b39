// Selector and explanation of geglu.
#include <liger_kernel/ops/geglu/plan.h>

namespace liger::geglu {

#define LIGER_VARIANTS <liger_kernel/ops/geglu/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

void forward(const ForwardArgs& args, const Host& host) {
  if (args.rows == 0 || args.cols == 0) return;
  ForwardArgs a = args;
  join_rows(a.rows, a.cols, {a.a_stride, a.b_stride, a.c_stride});
  select("geglu", variants<ForwardArgs>(), a, host.machine).run(a, host);
}

void backward(const BackwardArgs& args, const Host& host) {
  if (args.rows == 0 || args.cols == 0 || (!args.da && !args.db)) return;
  BackwardArgs a = args;
  if (!a.da) a.da_stride = a.cols;
  if (!a.db) a.db_stride = a.cols;
  join_rows(a.rows, a.cols, {a.dc_stride, a.a_stride, a.b_stride, a.da_stride, a.db_stride});
  select("geglu", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) { return explain_gated("geglu", variants<ForwardArgs>(), variants<BackwardArgs>(), p); }

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"geglu", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::geglu
