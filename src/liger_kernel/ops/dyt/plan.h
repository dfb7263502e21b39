// How the CUDA kernels cover the matrix: a thread keeps its columns, one vector of them, over many rows.
#pragma once
#include <algorithm>
#include <initializer_list>

#include <liger_kernel/ops/dyt/dyt.h>

namespace liger::dyt {

constexpr int kMaxThreads = 256;

struct Plan {
  int threads;     // side by side on a row
  int64_t chunks;  // blocks that make up a row
  int64_t parts;   // every parts-th row belongs to a block
};

// Blocks for 1024 threads on every multiprocessor, or one a row where there are fewer.
inline Plan choose(int64_t rows, int64_t cols, int vector, const Machine& m) {
  const int64_t per_row = (cols + vector - 1) / vector;
  Plan p{};
  p.threads = static_cast<int>(std::clamp<int64_t>((per_row + 31) / 32 * 32, 32, kMaxThreads));
  p.chunks = (per_row + p.threads - 1) / p.threads;
  p.parts =
      std::clamp<int64_t>(int64_t{m.multiprocessors} * (1024 / p.threads) / std::max<int64_t>(p.chunks, 1), 1, std::max<int64_t>(rows, 1));
  return p;
}
inline Plan choose(const ForwardArgs& a, int vector, const Machine& m) { return choose(a.rows, a.cols, vector, m); }
inline Plan choose(const BackwardArgs& a, int vector, const Machine& m) { return choose(a.rows, a.cols, vector, m); }

inline std::string describe(const Plan& p) {
  return std::to_string(p.parts) + " x " + std::to_string(p.chunks) + " blocks of " + std::to_string(p.threads) + " threads";
}

inline const char* reject(int64_t rows, int64_t cols, DType dtype, std::initializer_list<int64_t> strides,
                          std::initializer_list<const void*> pointers) {
  if (cols * size_of(dtype) % 16 != 0) return "a row is not a multiple of 16 bytes";
  for (const int64_t stride : strides) {
    if (rows > 1 && stride * size_of(dtype) % 16 != 0) return "rows are not 16-byte aligned";
  }
  for (const void* p : pointers) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return "a pointer is not 16-byte aligned";
  }
  return nullptr;
}
inline const char* reject_vector(const ForwardArgs& a, const Machine&) {
  return reject(a.rows, a.cols, a.dtype, {a.x_stride, a.y_stride}, {a.x, a.y});
}
inline const char* reject_vector(const BackwardArgs& a, const Machine&) {
  return reject(a.rows, a.cols, a.dtype, {a.dy_stride, a.x_stride, a.dx_stride}, {a.dy, a.x, a.dx});
}

}  // namespace liger::dyt
