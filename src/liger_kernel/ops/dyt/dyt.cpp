// Selector and explanation of dyt.
#include <liger_kernel/ops/dyt/plan.h>

namespace liger::dyt {

#define LIGER_VARIANTS <liger_kernel/ops/dyt/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

void forward(const ForwardArgs& a, const Host& host) {
  if (a.rows == 0 || a.cols == 0) return;
  select("dyt", variants<ForwardArgs>(), a, host.machine).run(a, host);
}

// Without elements the gradients of the parameters are still written: zeros.
void backward(const BackwardArgs& a, const Host& host) {
  const bool columns = a.cols > 0 && (a.dgamma || a.dbeta || (a.dx && a.rows > 0));
  if (!columns && !a.dalpha) return;
  select("dyt", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "dyt: the shape has ", p.shape.size(), " numbers, expected rows x columns");
  const int64_t rows = p.shape[0], cols = p.shape[1];
  const ForwardArgs f{.x = nullptr,
                      .alpha = nullptr,
                      .gamma = nullptr,
                      .beta = nullptr,
                      .y = nullptr,
                      .rows = rows,
                      .cols = cols,
                      .x_stride = cols,
                      .y_stride = cols,
                      .dtype = p.dtype,
                      .alpha_dtype = p.dtype,
                      .gamma_dtype = p.dtype,
                      .beta_dtype = p.dtype};
  const BackwardArgs b{.dy = nullptr,
                       .x = nullptr,
                       .alpha = nullptr,
                       .gamma = nullptr,
                       .dx = nullptr,
                       .dalpha = nullptr,
                       .dgamma = nullptr,
                       .dbeta = nullptr,
                       .rows = rows,
                       .cols = cols,
                       .dy_stride = cols,
                       .x_stride = cols,
                       .dx_stride = cols,
                       .dtype = p.dtype,
                       .alpha_dtype = p.dtype,
                       .gamma_dtype = p.dtype,
                       .beta_dtype = p.dtype};
  std::string plan = "a row a thread at a time, one pass";
  if (p.machine.backend == Backend::kCuda) {
    const int vector = reject_vector(f, p.machine) ? 1 : static_cast<int>(16 / size_of(p.dtype));
    plan = describe(choose(f, vector, p.machine)) + "; backward " + describe(choose(b, vector, p.machine));
  }
  return explain_rows("forward", variants<ForwardArgs>(), f, p.machine) + explain_rows("backward", variants<BackwardArgs>(), b, p.machine) +
         "plan\t" + plan + '\n';
}

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"dyt", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::dyt
