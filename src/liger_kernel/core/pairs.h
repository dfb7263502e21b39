// How losses of pairs of elements (input, target) are laid out over CUDA blocks and CPU threads; kl_div and tvd use it. The matrix is cut
// into items, spans of one row; a fixed number of blocks takes them in turn, and each writes one partial sum.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <string>

#include <liger_kernel/core/gated.h>

namespace liger {

constexpr int kPairThreads = 256;     // at most
constexpr int kPairAccesses = 2;      // of each operand in flight for a thread
constexpr int64_t kPairPiece = 4096;  // columns of an item on the CPU

struct PairPlan {
  int threads;
  int64_t span;    // columns of an item
  int64_t chunks;  // items of a row
  int64_t items;
  int64_t blocks;
};

inline PairPlan cover_pairs(int64_t rows, int64_t cols, int width, const Machine& m) {
  PairPlan p{};
  p.threads = 32;
  while (p.threads < kPairThreads && int64_t{p.threads} * width * kPairAccesses < cols) p.threads *= 2;
  p.span = int64_t{p.threads} * width * kPairAccesses;
  p.chunks = (cols + p.span - 1) / p.span;
  p.items = rows * p.chunks;
  p.blocks = std::min<int64_t>(p.items, int64_t{m.multiprocessors} * std::min(32, 2048 / p.threads));
  return p;
}

inline std::string describe(const PairPlan& p) {
  return std::to_string(p.items) + " items of " + std::to_string(p.span) + " columns in turn, " + std::to_string(p.blocks) + " blocks of " +
         std::to_string(p.threads) + " threads";
}

// 16-byte accesses: of one type, from one boundary to the next.
inline const char* reject_pairs(int64_t rows, DType dtype, DType target_dtype, std::initializer_list<int64_t> strides,
                                std::initializer_list<const void*> pointers) {
  if (dtype != target_dtype) return "the operands differ in dtype";
  return reject_unaligned(rows, dtype, strides, pointers);
}

}  // namespace liger
