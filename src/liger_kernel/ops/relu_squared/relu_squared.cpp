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

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "relu_squared: the shape has ", p.shape.size(), " numbers, expected rows x columns");
  int64_t rows = p.shape[0], cols = p.shape[1];
  join_rows(rows, cols, {cols});
  const int width = 16 / static_cast<int>(size_of(p.dtype));
  const ForwardArgs f{.x = nullptr, .y = nullptr, .rows = rows, .cols = cols, .x_stride = cols, .y_stride = cols, .dtype = p.dtype};
  const BackwardArgs b{.dy = nullptr,
                       .x = nullptr,
                       .dx = nullptr,
                       .rows = rows,
                       .cols = cols,
                       .dy_stride = cols,
                       .x_stride = cols,
                       .dx_stride = cols,
                       .dtype = p.dtype};
  return explain_rows("forward", variants<ForwardArgs>(), f, p.machine) + explain_rows("backward", variants<BackwardArgs>(), b, p.machine) +
         "plan\t" +
         (p.machine.backend == Backend::kCuda ? describe(cover_gated(rows, cols, width, kGatedForwardAccesses)) + "; backward " +
                                                    describe(cover_gated(rows, cols, width, kGatedBackwardAccesses))
                                              : "pieces of at most 4096 columns, one pass") +
         '\n';
}

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"relu_squared", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::relu_squared
