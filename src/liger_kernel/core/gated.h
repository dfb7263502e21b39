// Elementwise gated units, c = act(a) * b * scale (swiglu, geglu): what their selectors and plans share. The arithmetic is in
// cpu/gated.inl.h and cuda/gated.cuh, the activations in the ops' own *.inl.h.
#pragma once
#include <initializer_list>
#include <string>

#include <liger_kernel/core/registry.h>
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
// rows below. Each takes one or two accesses of `width` elements of each stream. Small blocks with few accesses keep the most of
// them in flight: on an H200, 16384 x 14336 bf16, forward 338 us (two halves of a row 321) and backward 543; with 256 threads and
// four and two accesses 356 (347) and 596; with 512 threads 381 (420) and 559. Streaming stores are worth 4 %; streaming loads cost
// backward 5 % (on random values; on constant ones nothing).
constexpr int kGatedThreads = 128;
constexpr int kGatedForwardAccesses = 2;
constexpr int kGatedBackwardAccesses = 1;

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

// What explain says of an elementwise op over [rows, cols] without gaps.
template <class Forward, class Backward>
std::string explain_gated(const char* op, std::span<const Variant<Forward>> forward, std::span<const Variant<Backward>> backward,
                          const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, op, ": the shape has ", p.shape.size(), " numbers, expected rows x columns of one operand");
  int64_t rows = p.shape[0], cols = p.shape[1];
  join_rows(rows, cols, {cols});
  Forward f{};
  Backward b{};
  f.rows = b.rows = rows, f.cols = b.cols = cols, f.dtype = b.dtype = p.dtype;  // one row has no strides
  const int width = 16 / static_cast<int>(size_of(p.dtype));
  return explain_rows("forward", forward, f, p.machine) + explain_rows("backward", backward, b, p.machine) + "plan\t" +
         (p.machine.backend == Backend::kCuda ? describe(cover_gated(rows, cols, width, kGatedForwardAccesses)) + "; backward " +
                                                    describe(cover_gated(rows, cols, width, kGatedBackwardAccesses))
                                              : "pieces of at most 4096 columns, one pass") +
         '\n';
}

}  // namespace liger
