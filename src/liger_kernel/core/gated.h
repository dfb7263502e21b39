// Elementwise gated units, c = act(a) * b * scale (swiglu, geglu): what their selectors and plans share. The arithmetic is in
// cpu/gated.inl.h and cuda/gated.cuh, the activations in the ops' own *.inl.h.
#pragma once
#include <initializer_list>
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger {

// Rows that lie back to back in every operand become one long row: then only the very end has a tail, and any width takes
// whole vectors.
inline void join_rows(int64_t& rows, int64_t& cols, std::initializer_list<int64_t> strides) {
  for (const int64_t stride : strides) {
    if (stride != cols) return;
  }
  cols *= rows;
  rows = 1;
}

// How the CUDA kernels cover [rows, cols]. A block has kGatedThreads threads: `lanes` side by side on a row, the others on the
// rows below. Each takes several accesses of `width` elements, a block therefore a run of 8 or 16 KB of each stream, which keeps
// DRAM pages open. Backward has three streams to hold where forward has two, so it takes fewer: three or four blocks fit one
// multiprocessor either way, and some load while others compute.
constexpr int kGatedThreads = 256;
constexpr int kGatedForwardAccesses = 4;
constexpr int kGatedBackwardAccesses = 2;

struct GatedPlan {
  int lanes_log2;
  int64_t span;    // columns of one row that a block covers: lanes * accesses * width
  int64_t chunks;  // spans in a row
  int64_t blocks;
};

inline GatedPlan cover_gated(int64_t rows, int64_t cols, int width, int accesses) {
  const int64_t per_row = (cols + width - 1) / width;
  GatedPlan p{};
  while ((1 << p.lanes_log2) < kGatedThreads && (int64_t{1} << p.lanes_log2) < per_row) ++p.lanes_log2;
  p.span = (int64_t{accesses} << p.lanes_log2) * width;
  p.chunks = (cols + p.span - 1) / p.span;
  const int64_t rows_per_block = kGatedThreads >> p.lanes_log2;
  p.blocks = (rows + rows_per_block - 1) / rows_per_block * p.chunks;
  return p;
}

inline std::string describe(const GatedPlan& p) {
  return std::to_string(p.blocks) + " blocks of " + std::to_string(kGatedThreads >> p.lanes_log2) + " rows x " + std::to_string(p.span) +
         " columns";
}

// 16-byte accesses need each row of each operand to begin on a 16-byte boundary.
inline const char* reject_unaligned(int64_t rows, DType dtype, std::initializer_list<int64_t> strides,
                                    std::initializer_list<const void*> pointers) {
  for (const int64_t stride : strides) {
    if (rows > 1 && stride * size_of(dtype) % 16 != 0) return "rows are not 16-byte aligned";
  }
  for (const void* p : pointers) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return "a pointer is not 16-byte aligned";
  }
  return nullptr;
}

}  // namespace liger
