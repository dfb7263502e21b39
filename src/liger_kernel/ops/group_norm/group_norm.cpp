// Selector and explanation of group_norm.
#include <liger_kernel/ops/group_norm/plan.h>

namespace liger::group_norm {

#define LIGER_VARIANTS <liger_kernel/ops/group_norm/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<ForwardArgs>> variants<ForwardArgs>();
template std::span<const Variant<BackwardArgs>> variants<BackwardArgs>();

namespace {

template <class Args>
void check_groups(const Args& a) {
  LIGER_CHECK(a.groups > 0 && a.channels % a.groups == 0, "group_norm: ", a.channels, " channels do not divide into ", a.groups, " groups");
}

}  // namespace

void forward(const ForwardArgs& a, const Host& host) {
  check_groups(a);
  if (a.batch == 0 || a.channels == 0 || a.spatial == 0) return;
  select("group_norm", variants<ForwardArgs>(), a, host.machine).run(a, host);
}

// Without elements dw and db are still written: zeros.
void backward(const BackwardArgs& args, const Host& host) {
  check_groups(args);
  BackwardArgs a = args;
  if (a.spatial == 0) a.batch = 0;
  if (a.channels == 0 || ((a.batch == 0 || !a.dx) && !a.dw && !a.db)) return;
  select("group_norm", variants<BackwardArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 4, "group_norm: the shape has ", p.shape.size(), " numbers, expected batch x channels x spatial x groups");
  const ForwardArgs f{.x = nullptr,
                      .weight = nullptr,
                      .bias = nullptr,
                      .y = nullptr,
                      .mean = nullptr,
                      .rstd = nullptr,
                      .batch = p.shape[0],
                      .channels = p.shape[1],
                      .spatial = p.shape[2],
                      .groups = p.shape[3],
                      .dtype = p.dtype,
                      .weight_dtype = p.dtype,
                      .bias_dtype = p.dtype,
                      .eps = 0};
  const BackwardArgs b{.dy = nullptr,
                       .x = nullptr,
                       .weight = nullptr,
                       .mean = nullptr,
                       .rstd = nullptr,
                       .dx = nullptr,
                       .dw = nullptr,
                       .db = nullptr,
                       .batch = f.batch,
                       .channels = f.channels,
                       .spatial = f.spatial,
                       .groups = f.groups,
                       .dtype = p.dtype,
                       .weight_dtype = p.dtype,
                       .bias_dtype = p.dtype};
  check_groups(f);
  std::string plan = "a group a thread at a time";
  if (p.machine.backend == Backend::kCuda) {
    const int width = reject_vector(f, p.machine) ? 1 : static_cast<int>(16 / size_of(p.dtype));
    plan = std::to_string(team_for(f.channels / f.groups * f.spatial, width)) + " threads a group, backward " +
           std::to_string(team_for(f.spatial, width)) + " a plane; then " +
           describe(cover_gated(f.batch * f.channels, f.spatial, width, kGatedForwardAccesses));
  }
  return explain_rows("forward", variants<ForwardArgs>(), f, p.machine) + explain_rows("backward", variants<BackwardArgs>(), b, p.machine) +
         "plan\t" + plan + '\n';
}

std::vector<std::string> all_names() { return names(variants<ForwardArgs>(), variants<BackwardArgs>()); }

const Registration registration({"group_norm", "batch x channels x spatial x groups", explain, all_names});

}  // namespace
}  // namespace liger::group_norm
