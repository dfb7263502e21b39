// Which variants take a problem; how they hold a row is in core/held_row.h.
#pragma once
#include <liger_kernel/core/held_row.h>
#include <liger_kernel/ops/softmax/softmax.h>

namespace liger::softmax {

inline int64_t vectors_of(int64_t cols, DType dtype) { return cols * size_of(dtype) / 16; }
inline int cluster_of(const ForwardArgs& a, const Machine& m) { return cluster_for(a.rows, vectors_of(a.cols, a.dtype), 1, m); }
inline int cluster_of(const BackwardArgs& a, const Machine& m) { return cluster_for(a.rows, vectors_of(a.cols, a.dtype), 2, m); }

inline const char* reject_vector(const ForwardArgs& a, const Machine&) {
  return reject_unlike(a.rows, a.dtype, {a.x_stride, a.y_stride}, {a.x, a.y});
}
inline const char* reject_vector(const BackwardArgs& a, const Machine&) {
  return reject_unlike(a.rows, a.dtype, {a.dy_stride, a.y_stride, a.dx_stride}, {a.dy, a.y, a.dx});
}
template <class Args>
const char* reject_cluster(const Args& a, const Machine& m) {
  if (m.floor >= 100) return "built for SM 9.0 alone";
  if (cluster_of(a, m) == 1) return "one block holds a row, and there are enough of them";
  return reject_vector(a, m);
}

}  // namespace liger::softmax
