// Selector and explanation of sparsemax.
#include <liger_kernel/ops/sparsemax/sparsemax.h>

namespace liger::sparsemax {

#define LIGER_VARIANTS <liger_kernel/ops/sparsemax/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

void forward(const ForwardArgs& a, const Host& host) {
  if (a.rows == 0 || a.cols == 0) return;
  select("sparsemax", variants<ForwardArgs>(), a, host.machine).run(a, host);
}

void backward(const BackwardArgs& a, const Host& host) {
  if (a.rows == 0 || a.cols == 0) return;
  select("sparsemax", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) { return explain_row_map("sparsemax", variants<ForwardArgs>(), variants<BackwardArgs>(), p); }

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"sparsemax", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::sparsemax
