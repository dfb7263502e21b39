// When the kernels for whole vectors take a call, and how they cover it: as rms_norm's (core/rms.h), but that a group of columns is a row
// of its own. blockIdx.y counts the groups.
#pragma once
#include <liger_kernel/ops/rms_norm_gated/rms_norm_gated.h>

namespace liger::rms_norm_gated {

constexpr int64_t kMaxGridGroups = 65535;

template <class Args>
int64_t groups_of(const Args& a) {
  return a.cols / a.group_size;
}

// A thread holds its vectors of x and of the gate: four of each where rms_norm's takes up to eight of x.
inline RowPlan choose(const ForwardArgs& a) {
  const int64_t needed = row_vectors(a.group_size, a.dtype);
  return cover_row(needed, needed <= 4 ? 1 : needed <= 64 ? 2 : needed <= 4 * kRowMaxForwardThreads ? 4 : 8, 128);
}
// As rms_norm's backward, but that three rows are read at a time and that exponentials take registers: one or four vectors a thread leave
// room for 768 or 384 threads on a multiprocessor (rows.cuh's launch bounds). The persistent blocks are shared out to the groups;
// `blocks` are those of one group.
inline RowPlan choose(const BackwardArgs& a, const Machine& m) {
  constexpr int kStreams = 3;
  RowPlan p = plan_rows_backward(a.rows, a.group_size, a.dtype, kStreams, m);
  const int threads = p.vectors == 1 ? 768 : p.vectors == 2 ? 640 : 384;
  const int64_t fit = std::clamp(threads / p.threads, 1, 8), turn = p.threads / p.lanes;
  const int64_t stage = int64_t{16} * kStreams * p.vectors * p.threads, room = (m.shared_memory + 1024) / fit - 1024 - kRowOwnShared;
  p.stages = static_cast<int>(std::min<int64_t>(room / stage, 3));
  p.shared = p.stages * stage;
  const int64_t most = std::max<int64_t>(1, m.multiprocessors * fit / groups_of(a));
  p.blocks = static_cast<int>(std::clamp<int64_t>((a.rows + turn - 1) / turn, 1, most));
  return p;
}

template <class Args>
const char* reject_groups(const Args& a, std::initializer_list<int64_t> strides, std::initializer_list<const void*> pointers) {
  if (groups_of(a) > kMaxGridGroups) return "more than 65535 groups";
  return reject_rows(a.group_size, a.dtype, a.weight_dtype, strides, pointers);
}
inline const char* reject_registers(const ForwardArgs& a, const Machine&) {
  return reject_groups(a, {a.x_stride, a.gate_stride, a.y_stride}, {a.x, a.gate, a.y, a.weight});
}
inline const char* reject_pipelined(const BackwardArgs& a, const Machine& m) {
  if (const char* reason = reject_groups(a, {a.dy_stride, a.x_stride, a.gate_stride, a.dx_stride, a.dgate_stride},
                                         {a.dy, a.x, a.gate, a.dx, a.dgate, a.weight})) {
    return reason;
  }
  return choose(a, m).stages < 1 ? "a row of each input does not fit in shared memory" : nullptr;
}

}  // namespace liger::rms_norm_gated
