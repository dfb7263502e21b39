// Selector and explanation of swiglu.
#include <liger_kernel/ops/swiglu/plan.h>

namespace liger::swiglu {

#define LIGER_VARIANTS <liger_kernel/ops/swiglu/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

void forward(const ForwardArgs& args, const Host& host) {
  if (args.rows == 0 || args.cols == 0) return;
  ForwardArgs a = args;
  join_rows(a.rows, a.cols, {a.a_stride, a.b_stride, a.c_stride});
  select("swiglu", variants<ForwardArgs>(), a, host.machine).run(a, host);
}

void backward(const BackwardArgs& args, const Host& host) {
  if (args.rows == 0 || args.cols == 0 || (!args.da && !args.db)) return;
  BackwardArgs a = args;
  if (!a.da) a.da_stride = a.cols;
  if (!a.db) a.db_stride = a.cols;
  join_rows(a.rows, a.cols, {a.dc_stride, a.a_stride, a.b_stride, a.da_stride, a.db_stride});
  select("swiglu", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "swiglu: the shape has ", p.shape.size(), " numbers, expected rows x columns of one operand");
  int64_t rows = p.shape[0], cols = p.shape[1];
  join_rows(rows, cols, {cols});
  const int width = 16 / static_cast<int>(size_of(p.dtype));
  const ForwardArgs f{.a = nullptr,
                      .b = nullptr,
                      .c = nullptr,
                      .rows = rows,
                      .cols = cols,
                      .a_stride = cols,
                      .b_stride = cols,
                      .c_stride = cols,
                      .dtype = p.dtype};
  const BackwardArgs b{.dc = nullptr,
                       .a = nullptr,
                       .b = nullptr,
                       .da = nullptr,
                       .db = nullptr,
                       .rows = rows,
                       .cols = cols,
                       .dc_stride = cols,
                       .a_stride = cols,
                       .b_stride = cols,
                       .da_stride = cols,
                       .db_stride = cols,
                       .dtype = p.dtype};
  return explain_rows("forward", variants<ForwardArgs>(), f, p.machine) + explain_rows("backward", variants<BackwardArgs>(), b, p.machine) +
         "plan\t" +
         (p.machine.backend == Backend::kCuda ? describe(cover_gated(rows, cols, width, kGatedForwardAccesses)) + "; backward " +
                                                    describe(cover_gated(rows, cols, width, kGatedBackwardAccesses))
                                              : "pieces of at most 4096 columns, one pass") +
         '\n';
}

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"swiglu", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::swiglu
