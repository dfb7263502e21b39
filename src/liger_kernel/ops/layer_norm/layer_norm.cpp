// Selector and explanation of layer_norm.
#include <liger_kernel/ops/layer_norm/plan.h>

namespace liger::layer_norm {

#define LIGER_VARIANTS <liger_kernel/ops/layer_norm/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

void forward(const ForwardArgs& args, const Host& host) {
  if (args.rows > 0 && args.cols > 0) select("layer_norm", variants<ForwardArgs>(), args, host.machine).run(args, host);
}

void backward(const BackwardArgs& args, const Host& host) {
  if (args.cols > 0) select("layer_norm", variants<BackwardArgs>(), args, host.machine).run(args, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "layer_norm: the shape has ", p.shape.size(), " numbers, expected rows x columns");
  const int64_t rows = p.shape[0], cols = p.shape[1];
  const ForwardArgs f{.x = nullptr,
                      .weight = nullptr,
                      .bias = nullptr,
                      .y = nullptr,
                      .mean = nullptr,
                      .rstd = nullptr,
                      .rows = rows,
                      .cols = cols,
                      .x_stride = cols,
                      .y_stride = cols,
                      .dtype = p.dtype,
                      .weight_dtype = p.dtype,
                      .bias_dtype = p.dtype,
                      .eps = 1e-6f};
  const BackwardArgs b{.dy = nullptr,
                       .x = nullptr,
                       .weight = nullptr,
                       .mean = nullptr,
                       .rstd = nullptr,
                       .dx = nullptr,
                       .dw = nullptr,
                       .db = nullptr,
                       .rows = rows,
                       .cols = cols,
                       .dy_stride = cols,
                       .x_stride = cols,
                       .dx_stride = cols,
                       .dtype = p.dtype,
                       .weight_dtype = p.dtype,
                       .bias_dtype = p.dtype};
  return explain_rows("forward", variants<ForwardArgs>(), f, p.machine) + explain_rows("backward", variants<BackwardArgs>(), b, p.machine) +
         "plan\t" +
         (p.machine.backend == Backend::kCuda ? describe(choose(f)) + "; backward " + describe(choose(b, p.machine))
                                              : "one row at a time per thread") +
         '\n';
}

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"layer_norm", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::layer_norm
