// Selector and explanation of rms_norm_gated.
#include <liger_kernel/ops/rms_norm_gated/plan.h>

namespace liger::rms_norm_gated {

#define LIGER_VARIANTS <liger_kernel/ops/rms_norm_gated/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

namespace {

template <class Args>
void check(const Args& a) {
  LIGER_CHECK(a.group_size > 0 && a.cols % a.group_size == 0, "rms_norm_gated: group_size is ", a.group_size,
              ", expected a divisor of the ", a.cols, " columns of x");
  LIGER_CHECK(a.rounding != Rounding::kEachStep, "rms_norm_gated: rounding is -1 (each step), expected 0 (before the weight) or 1 (last)");
}

}  // namespace

void forward(const ForwardArgs& args, const Host& host) {
  if (args.rows == 0 || args.cols == 0) return;
  check(args);
  select("rms_norm_gated", variants<ForwardArgs>(), args, host.machine).run(args, host);
}

void backward(const BackwardArgs& args, const Host& host) {
  if (args.cols == 0) return;
  check(args);
  BackwardArgs a = args;
  if (!a.gate) a.dgate = nullptr;
  if (!a.dx) a.dx_stride = a.cols;
  if (!a.dgate) a.dgate_stride = a.cols;
  select("rms_norm_gated", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "rms_norm_gated: the shape has ", p.shape.size(), " numbers, expected rows x columns of one group");
  const int64_t rows = p.shape[0], cols = p.shape[1];
  const ForwardArgs f{.x = nullptr,
                      .gate = nullptr,
                      .weight = nullptr,
                      .y = nullptr,
                      .rstd = nullptr,
                      .rows = rows,
                      .cols = cols,
                      .group_size = cols,
                      .x_stride = cols,
                      .gate_stride = cols,
                      .y_stride = cols,
                      .dtype = p.dtype,
                      .weight_dtype = p.dtype,
                      .eps = 1e-6f};
  const BackwardArgs b{.dy = nullptr,
                       .x = nullptr,
                       .gate = nullptr,
                       .weight = nullptr,
                       .rstd = nullptr,
                       .dx = nullptr,
                       .dgate = nullptr,
                       .dw = nullptr,
                       .rows = rows,
                       .cols = cols,
                       .group_size = cols,
                       .dy_stride = cols,
                       .x_stride = cols,
                       .gate_stride = cols,
                       .dx_stride = cols,
                       .dgate_stride = cols,
                       .dtype = p.dtype,
                       .weight_dtype = p.dtype};
  return explain_rows("forward", variants<ForwardArgs>(), f, p.machine) + explain_rows("backward", variants<BackwardArgs>(), b, p.machine) +
         "plan\t" +
         (p.machine.backend == Backend::kCuda ? describe(choose(f)) + "; backward " + describe(choose(b, p.machine))
                                              : "one group at a time per thread") +
         '\n';
}

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"rms_norm_gated", "rows x columns of one group", explain, all_names});

}  // namespace
}  // namespace liger::rms_norm_gated
