// Which variants take a problem; how they hold a row is in core/held_row.h.
#pragma once
#include <liger_kernel/core/held_row.h>
#include <liger_kernel/ops/softmax/softmax.h>

namespace liger::softmax {

inline int64_t vectors_of(int64_t cols, DType dtype) { return cols * size_of(dtype) / 16; }

// --- rows that are too long for the registers of one block lie in shared memory, and the next row is on its way meanwhile ----------------
// Either a block has a multiprocessor and two rows for itself, or two blocks share it, each with one row, which gives way to the next as it
// is written. The latter hides the exchanges of larger clusters: 8192 x 128256 bf16 on an H200.
constexpr int64_t kStagedOwnMemory = 6144;  // bytes of shared memory that rows may not take

struct StagedPlan {
  int cluster;    // blocks on a row; 0: a row does not fit
  int stages;     // rows in shared memory
  int threads;    // of a block
  int64_t slice;  // vectors of a row for each block
  int bytes;      // of shared memory
};

constexpr int staged_threads(int stages) { return stages == 2 ? 1024 : 512; }

inline StagedPlan choose_staged(int64_t rows, int64_t vectors, int operands, const Machine& m) {
  for (int cluster = 1; cluster <= kMaxRowCluster; cluster *= 2) {
    const int stages = cluster <= operands ? 2 : 1;
    const int64_t slice = ((vectors + cluster - 1) / cluster + 7) / 8 * 8, bytes = slice * 16 * operands * stages;
    if (bytes > (stages == 2 ? m.shared_memory : (m.shared_memory + 1024) / 2 - 1024) - kStagedOwnMemory) continue;
    if (cluster < kMaxRowCluster && rows * cluster * 2 <= m.multiprocessors && vectors / cluster >= 1024) continue;  // fill the machine
    return {cluster, stages, staged_threads(stages), slice, static_cast<int>(bytes)};
  }
  return {};
}
inline StagedPlan choose_staged(const ForwardArgs& a, const Machine& m) { return choose_staged(a.rows, vectors_of(a.cols, a.dtype), 1, m); }
inline StagedPlan choose_staged(const BackwardArgs& a, const Machine& m) {
  return choose_staged(a.rows, vectors_of(a.cols, a.dtype), 2, m);
}
inline std::string describe(const StagedPlan& p) {
  return std::to_string(p.cluster) + (p.cluster > 1 ? " blocks" : " block") + " of " + std::to_string(p.threads) + " threads a row, " +
         std::to_string(p.stages) + (p.stages > 1 ? " rows in " : " row in ") + std::to_string(p.bytes) + " bytes of shared memory";
}

inline const char* reject_vector(const ForwardArgs& a, const Machine&) {
  return reject_unlike(a.rows, a.dtype, {a.x_stride, a.y_stride}, {a.x, a.y});
}
inline const char* reject_vector(const BackwardArgs& a, const Machine&) {
  return reject_unlike(a.rows, a.dtype, {a.dy_stride, a.y_stride, a.dx_stride}, {a.dy, a.y, a.dx});
}
inline const char* reject_cluster(int64_t rows, int64_t vectors, int operands, const Machine& m) {
  if (m.floor >= 100) return "built for SM 9.0 alone";
  return cluster_for(rows, vectors, operands, m.multiprocessors) == 1 ? "one block holds a row, and there are enough of them" : nullptr;
}
inline const char* reject_cluster(const ForwardArgs& a, const Machine& m) {
  const char* reason = reject_cluster(a.rows, vectors_of(a.cols, a.dtype), 1, m);
  return reason ? reason : reject_vector(a, m);
}
inline const char* reject_cluster(const BackwardArgs& a, const Machine& m) {
  const char* reason = reject_cluster(a.rows, vectors_of(a.cols, a.dtype), 2, m);
  return reason ? reason : reject_vector(a, m);
}

}  // namespace liger::softmax
