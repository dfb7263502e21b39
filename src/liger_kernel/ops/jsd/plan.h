// When the kernel for whole vectors takes a call, and how many threads share a row.
#pragma once
#include <liger_kernel/core/held_row.h>
#include <liger_kernel/ops/jsd/jsd.h>

namespace liger::jsd {

constexpr int kMaxThreads = 512;

// Two to four steps a thread before a block grows.
inline int threads_for(int64_t steps) {
  int threads = 32;
  while (threads < kMaxThreads && threads * 4 <= steps) threads *= 2;
  return threads;
}

// The rows of all three lie alike between 16-byte boundaries.
inline const char* reject_vectors(const ForwardArgs& a, const Machine&) {
  if (!a.dx) return reject_unlike(a.rows, a.dtype, {a.q_stride, a.p_stride}, {a.log_q, a.log_p});
  return reject_unlike(a.rows, a.dtype, {a.q_stride, a.p_stride, a.dx_stride}, {a.log_q, a.log_p, a.dx});
}

}  // namespace liger::jsd
