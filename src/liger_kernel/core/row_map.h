// Maps of each row of a matrix to another, y = f(x) with dx = g(dy, y); softmax and sparsemax are. Their arguments, which variants take
// them, and how they are explained; how a CUDA kernel holds a row is in core/held_row.h.
#pragma once
#include <string>

#include <liger_kernel/core/held_row.h>
#include <liger_kernel/core/registry.h>

namespace liger {

struct RowMapForward {
  const void* x;  // [rows, cols]
  void* y;        // [rows, cols], x's type
  int64_t rows, cols;
  int64_t x_stride, y_stride;  // elements from row to row
  DType dtype;
};

struct RowMapBackward {
  const void* dy;  // [rows, cols]
  const void* y;   // [rows, cols], the result of forward
  void* dx;        // [rows, cols]; all of one type
  int64_t rows, cols;
  int64_t dy_stride, y_stride, dx_stride;
  DType dtype;
};

inline int operands(const RowMapForward&) { return 1; }  // that a block holds
inline int operands(const RowMapBackward&) { return 2; }

// The plan of the cluster variant, or with `cluster` = 1 of the vector variant.
template <class Args>
int cluster_of(const Args& a, const Machine& m) {
  return cluster_for(a.rows, a.cols * size_of(a.dtype) / 16, operands(a), m);
}
template <class Args>
HeldRowPlan plan_of(const Args& a, int cluster, const Machine& m) {
  return choose_row(a.cols * size_of(a.dtype) / 16, operands(a), cluster, m.shared_memory);
}

inline const char* reject_vector(const RowMapForward& a, const Machine&) {
  return reject_unlike(a.rows, a.dtype, {a.x_stride, a.y_stride}, {a.x, a.y});
}
inline const char* reject_vector(const RowMapBackward& a, const Machine&) {
  return reject_unlike(a.rows, a.dtype, {a.dy_stride, a.y_stride, a.dx_stride}, {a.dy, a.y, a.dx});
}
template <class Args>
const char* reject_cluster(const Args& a, const Machine& m) {
  if (m.floor >= 100) return "built for SM 9.0 alone";
  if (cluster_of(a, m) == 1) return "one block holds a row, and there are enough of them";
  return reject_vector(a, m);
}

inline std::string explain_row_map(const char* op, std::span<const Variant<RowMapForward>> forward,
                                   std::span<const Variant<RowMapBackward>> backward, const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, op, ": the shape has ", p.shape.size(), " numbers, expected rows x columns");
  const int64_t rows = p.shape[0], cols = p.shape[1];
  const RowMapForward f{.x = nullptr, .y = nullptr, .rows = rows, .cols = cols, .x_stride = cols, .y_stride = cols, .dtype = p.dtype};
  const RowMapBackward b{.dy = nullptr,
                         .y = nullptr,
                         .dx = nullptr,
                         .rows = rows,
                         .cols = cols,
                         .dy_stride = cols,
                         .y_stride = cols,
                         .dx_stride = cols,
                         .dtype = p.dtype};
  const auto plan = [&](const auto& a) {
    return describe(plan_of(a, reject_cluster(a, p.machine) ? 1 : cluster_of(a, p.machine), p.machine));
  };
  return explain_rows("forward", forward, f, p.machine) + explain_rows("backward", backward, b, p.machine) + "plan\t" +
         (p.machine.backend == Backend::kCuda ? plan(f) + "; backward " + plan(b)
                                              : "a row a thread at a time, from cache after its first pass") +
         '\n';
}

}  // namespace liger
