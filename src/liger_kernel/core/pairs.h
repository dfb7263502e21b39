// How losses of pairs of elements (input, target) are laid out over CUDA blocks and CPU threads; kl_div and tvd use it. The matrix is cut
// into items, spans of one row. On CUDA a thread takes one vector of each operand and a block one item, whose sum it writes: many short
// blocks keep more of the memory busy than few that take items in turn. H200, KL of 8192 x 128256 in bf16, forward as a multiple of a
// copy, without the addition of the sums: blocks of 1, 4, 16 items 1.01, 1.04, 1.07; of two vectors a thread 1.03, 1.05, 1.08. With it,
// 1056 blocks that take all items in turn: 1.11.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <string>

#include <liger_kernel/core/gated.h>

namespace liger {

constexpr int kPairThreads = 256;         // at most
constexpr int64_t kPairBlocks = 1 << 20;  // at most; beyond, blocks take items in turn
constexpr int kPairSums = 128;            // into which the sums of many blocks are added first
constexpr int64_t kPairPiece = 4096;      // columns of an item on the CPU

struct PairPlan {
  int threads;
  int64_t span;    // columns of an item
  int64_t chunks;  // items of a row
  int64_t items;
  int64_t blocks;
};

inline PairPlan cover_pairs(int64_t rows, int64_t cols, int width) {
  PairPlan p{};
  p.threads = 32;
  while (p.threads < kPairThreads && int64_t{p.threads} * width < cols) p.threads *= 2;
  p.span = int64_t{p.threads} * width;
  p.chunks = (cols + p.span - 1) / p.span;
  p.items = rows * p.chunks;
  p.blocks = std::min(p.items, kPairBlocks);
  return p;
}

inline std::string describe(const PairPlan& p) {
  return std::to_string(p.items) + " items of " + std::to_string(p.span) + " columns, " + std::to_string(p.blocks) + " blocks of " +
         std::to_string(p.threads) + " threads";
}

// 16-byte accesses: of one type, from one boundary to the next.
inline const char* reject_pairs(int64_t rows, DType dtype, DType target_dtype, std::initializer_list<int64_t> strides,
                                std::initializer_list<const void*> pointers) {
  if (dtype != target_dtype) return "the operands differ in dtype";
  return reject_unaligned(rows, dtype, strides, pointers);
}

template <class Forward, class Backward>
std::string explain_pairs(const char* op, std::span<const Variant<Forward>> forward, std::span<const Variant<Backward>> backward,
                          const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, op, ": the shape has ", p.shape.size(), " numbers, expected rows x columns");
  int64_t rows = p.shape[0], cols = p.shape[1];
  join_rows(rows, cols, {cols});
  Forward f{};
  Backward b{};
  f.rows = b.rows = rows, f.cols = b.cols = cols;  // one row has no strides
  f.dtype = f.target_dtype = b.dtype = b.target_dtype = p.dtype;
  return explain_rows("forward", forward, f, p.machine) + explain_rows("backward", backward, b, p.machine) + "plan\t" +
         (p.machine.backend == Backend::kCuda ? describe(cover_pairs(rows, cols, static_cast<int>(16 / size_of(p.dtype))))
                                              : "pieces of at most " + std::to_string(kPairPiece) + " columns, one pass") +
         '\n';
}

}  // namespace liger
