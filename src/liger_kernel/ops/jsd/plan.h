// When the kernel for whole vectors takes a call, and how many threads share a row.
#pragma once
#include <liger_kernel/ops/jsd/jsd.h>

namespace liger::jsd {

constexpr int kMaxThreads = 512;

// Two to four steps a thread before a block grows.
inline int threads_for(int64_t steps) {
  int threads = 32;
  while (threads < kMaxThreads && threads * 4 <= steps) threads *= 2;
  return threads;
}

// Every row of all three begins on a 16-byte boundary; a rest of less than a vector at a row's end is allowed.
inline const char* reject_vectors(const ForwardArgs& a, const Machine&) {
  const int64_t size = size_of(a.dtype);
  for (const void* p : {a.log_q, a.log_p, static_cast<const void*>(a.dx)}) {
    if (reinterpret_cast<uintptr_t>(p) % 16) return "a pointer is not 16-byte aligned";
  }
  for (const int64_t stride : {a.q_stride, a.p_stride, a.dx ? a.dx_stride : 0}) {
    if (stride * size % 16) return "rows do not begin on 16-byte boundaries";
  }
  return nullptr;
}

}  // namespace liger::jsd
