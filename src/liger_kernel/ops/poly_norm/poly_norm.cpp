// Selector and explanation of poly_norm.
#include <liger_kernel/ops/poly_norm/plan.h>

namespace liger::poly_norm {

#define LIGER_VARIANTS <liger_kernel/ops/poly_norm/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

void forward(const ForwardArgs& a, const Host& host) {
  if (a.rows == 0 || a.cols == 0) return;
  select("poly_norm", variants<ForwardArgs>(), a, host.machine).run(a, host);
}

// Without elements dw and db are still written: zeros.
void backward(const BackwardArgs& args, const Host& host) {
  BackwardArgs a = args;
  if (a.cols == 0) a.rows = 0;
  if ((a.rows == 0 || !a.dx) && !a.dw && !a.db) return;
  select("poly_norm", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "poly_norm: the shape has ", p.shape.size(), " numbers, expected rows x columns");
  const int64_t rows = p.shape[0], cols = p.shape[1];
  const ForwardArgs f{.x = nullptr,
                      .weight = nullptr,
                      .bias = nullptr,
                      .y = nullptr,
                      .rstd = nullptr,
                      .rows = rows,
                      .cols = cols,
                      .x_stride = cols,
                      .y_stride = cols,
                      .dtype = p.dtype,
                      .weight_dtype = p.dtype,
                      .bias_dtype = p.dtype,
                      .eps = 0};
  const BackwardArgs b{.dy = nullptr,
                       .x = nullptr,
                       .weight = nullptr,
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
  std::string plan = "a row a thread at a time, read twice";
  if (p.machine.backend == Backend::kCuda) {
    plan = reject_registers(f, p.machine) ? std::to_string(kWideThreads) + " threads a row, read twice"
                                          : describe(choose(f)) + "; backward " + describe(choose(b, p.machine));
  }
  return explain_rows("forward", variants<ForwardArgs>(), f, p.machine) + explain_rows("backward", variants<BackwardArgs>(), b, p.machine) +
         "plan\t" + plan + '\n';
}

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"poly_norm", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::poly_norm
