// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/jsd/jsd.h>

namespace liger::jsd {
namespace {

using cross_entropy::LabelStats;

// log_q, log_p [rows, cols]; target [rows] int64 and stats, what cross_entropy_label_stats says of it, or neither.
// -> loss [rows] fp32, dx like log_q, of no rows when not wanted
std::tuple<Tensor, Tensor> forward_torch(const Tensor& log_q, const Tensor& log_p, const std::optional<Tensor>& target,
                                         const std::optional<Tensor>& stats, int64_t ignore_index, double beta, double scale,
                                         bool want_dx) {
  check_rows("jsd", "log_q", log_q);
  check_rows("jsd", "log_p", log_p);
  const auto [rows, cols, p_stride] = rows_like("jsd", "log_p", log_p, "log_q", log_q);
  if (target) {
    check_devices("jsd", log_q, *target);
    LIGER_CHECK(target->dim() == 1 && target->size(0) == rows && target->scalar_type() == ScalarType::Long, "jsd: target has ",
                target->numel(), " elements, expected ", rows, " of int64");
  }
  if (stats) {
    check_devices("jsd", log_q, *stats);
    LIGER_CHECK(stats->scalar_type() == ScalarType::Int && stats->numel() * 4 == int64_t{sizeof(LabelStats)} && stats->is_contiguous(),
                "jsd: stats is not what cross_entropy_label_stats returns");
  }
  const TorchHost host(log_q);
  Tensor loss = empty(log_q, {rows}, ScalarType::Float), dx = empty(log_q, {want_dx ? rows : 0, cols}, log_q.scalar_type());
  forward({.log_q = const_data(log_q),
           .log_p = const_data(log_p),
           .target = target ? const_data<int64_t>(*target) : nullptr,
           .stats = stats ? const_data<LabelStats>(*stats) : nullptr,
           .dx = want_dx ? data(dx) : nullptr,
           .loss = data<float>(loss),
           .rows = rows,
           .cols = cols,
           .q_stride = log_q.stride(0),
           .p_stride = p_stride,
           .dx_stride = cols,
           .target_stride = target ? target->stride(0) : 1,
           .dtype = dtype_of("jsd", log_q),
           .ignore_index = ignore_index,
           .beta = static_cast<float>(beta),
           .scale = static_cast<float>(scale)},
          host);
  return {loss, dx};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def(
      "jsd_forward(Tensor log_q, Tensor log_p, Tensor? target, Tensor? stats, int ignore_index, float beta, float scale, bool want_dx)"
      " -> (Tensor loss, Tensor dx)");
}

#define LIGER_REGISTER(key) \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) { m.impl("jsd_forward", TORCH_BOX(&forward_torch)); }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::jsd
