// Selector and explanation of softmax.
#include <liger_kernel/ops/softmax/plan.h>

namespace liger::softmax {

#define LIGER_VARIANTS <liger_kernel/ops/softmax/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

void forward(const ForwardArgs& a, const Host& host) {
  if (a.rows == 0 || a.cols == 0) return;
  select("softmax", variants<ForwardArgs>(), a, host.machine).run(a, host);
}

void backward(const BackwardArgs& a, const Host& host) {
  if (a.rows == 0 || a.cols == 0) return;
  select("softmax", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "softmax: the shape has ", p.shape.size(), " numbers, expected rows x columns");
  const int64_t rows = p.shape[0], cols = p.shape[1];
  const ForwardArgs f{.x = nullptr, .y = nullptr, .rows = rows, .cols = cols, .x_stride = cols, .y_stride = cols, .dtype = p.dtype};
  const BackwardArgs b{.dy = nullptr,
                       .y = nullptr,
                       .dx = nullptr,
                       .rows = rows,
                       .cols = cols,
                       .dy_stride = cols,
                       .y_stride = cols,
                       .dx_stride = cols,
                       .dtype = p.dtype};
  std::string plan = "a row a thread at a time, from cache after its first pass";
  if (p.machine.backend == Backend::kCuda) {
    const int64_t vectors = vectors_of(cols, p.dtype);
    const auto cluster = [&](const auto& a) { return reject_cluster(a, p.machine) ? 1 : cluster_of(a, p.machine); };
    plan = describe(choose_row(vectors, 1, cluster(f), p.machine.shared_memory)) + "; backward " +
           describe(choose_row(vectors, 2, cluster(b), p.machine.shared_memory));
  }
  return explain_rows("forward", variants<ForwardArgs>(), f, p.machine) + explain_rows("backward", variants<BackwardArgs>(), b, p.machine) +
         "plan\t" + plan + '\n';
}

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"softmax", "rows x columns", explain, all_names});

}  // namespace
}  // namespace liger::softmax
