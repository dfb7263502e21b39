// How the CUDA kernels cover a row: `threads` threads hold `vectors` 16-byte vectors of it each.
#pragma once
#include <algorithm>
#include <initializer_list>

#include <liger_kernel/ops/poly_norm/poly_norm.h>

namespace liger::poly_norm {

constexpr int kMaxVectors = 4;
constexpr int kMaxThreads = 1024;
constexpr int kWideThreads = 512;

struct Plan {
  int threads;
  int vectors;  // per thread, a template argument of the kernel: 1, 2 or 4
  int blocks;   // 0: one per row
};

inline std::string describe(const Plan& p) {
  return std::to_string(p.threads) + " threads x " + std::to_string(p.vectors) + " vectors of 16 bytes, " +
         (p.blocks ? std::to_string(p.blocks) + " blocks" : std::string("one block a row"));
}

inline const char* reject_shape(int64_t cols, DType dtype, std::initializer_list<int64_t> strides,
                                std::initializer_list<const void*> pointers) {
  const int64_t bytes = cols * size_of(dtype);
  if (bytes % 16 != 0) return "a row is not a multiple of 16 bytes";
  if (bytes > int64_t{kMaxThreads} * kMaxVectors * 16) return "a row does not fit in one block's registers";
  for (int64_t stride : strides) {
    if (stride * size_of(dtype) % 16 != 0) return "rows are not 16-byte aligned";
  }
  for (const void* p : pointers) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return "a pointer is not 16-byte aligned";
  }
  return nullptr;
}
inline const char* reject_registers(const ForwardArgs& a, const Machine&) {
  return reject_shape(a.cols, a.dtype, {a.x_stride, a.y_stride}, {a.x, a.y});
}
inline const char* reject_registers(const BackwardArgs& a, const Machine&) {
  return reject_shape(a.cols, a.dtype, {a.x_stride, a.dy_stride, a.dx_stride}, {a.x, a.dy, a.dx});
}

// Two vectors a thread keep enough loads in flight; wider rows take more threads first, more vectors second.
inline Plan cover(int64_t cols, DType dtype) {
  const int64_t per_row = (cols * size_of(dtype) + 15) / 16;
  int threads = 32;
  while (threads < kMaxThreads && threads * 2 < per_row) threads *= 2;
  const int64_t needed = (per_row + threads - 1) / threads;
  return {.threads = threads, .vectors = needed <= 1 ? 1 : needed <= 2 ? 2 : 4, .blocks = 0};
}
inline Plan choose(const ForwardArgs& a) { return cover(a.cols, a.dtype); }

// Blocks that stay for all their rows and fill the device with 1024 threads on each multiprocessor: each writes one partial sum of
// the four gradients, so that few remain to be added.
inline int resident_blocks(int64_t rows, int threads, const Machine& m) {
  return static_cast<int>(std::clamp<int64_t>(rows, 1, int64_t{m.multiprocessors} * std::clamp(1024 / threads, 1, 8)));
}
inline Plan choose(const BackwardArgs& a, const Machine& m) {
  Plan p = cover(a.cols, a.dtype);
  p.blocks = resident_blocks(a.rows, p.threads, m);
  return p;
}

}  // namespace liger::poly_norm
