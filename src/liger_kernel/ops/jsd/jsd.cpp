// Selector and explanation of jsd.
#include <liger_kernel/ops/jsd/plan.h>

namespace liger::jsd {

#define LIGER_VARIANTS <liger_kernel/ops/jsd/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();

void forward(const ForwardArgs& args, const Host& host) {
  LIGER_CHECK(args.beta >= 0 && args.beta <= 1, "jsd: beta is ", args.beta, ", expected a number in [0, 1]");
  if (args.rows > 0) select("jsd", variants<ForwardArgs>(), args, host.machine).run(args, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "jsd: the shape has ", p.shape.size(), " numbers, expected rows x vocabulary");
  ForwardArgs f{};
  f.rows = p.shape[0], f.cols = f.q_stride = f.p_stride = f.dx_stride = p.shape[1], f.dtype = p.dtype;
  return explain_rows("forward", variants<ForwardArgs>(), f, p.machine) + "plan\t" +
         (p.machine.backend == Backend::kCuda
              ? "one block of " + std::to_string(threads_for(f.cols * size_of(p.dtype) / 16)) + " threads a row, one pass"
              : "one row at a time per thread, one pass") +
         '\n';
}

std::vector<std::string> all_names() { return names(variants<ForwardArgs>()); }

const Registration registration({"jsd", "rows x vocabulary", explain, all_names});

}  // namespace
}  // namespace liger::jsd
