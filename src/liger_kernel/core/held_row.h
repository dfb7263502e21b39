// How CUDA kernels hold a row while they need it more than once: as 16-byte vectors in the registers of a warp, a block, or the blocks
// of a cluster (core/cuda/held_row.cuh), and beyond that in their shared memory. What does not fit there is read again, from L2 as a rule.
// softmax and sparsemax use it.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger {

constexpr int kMaxRowThreads = 512;       // of a block; two such blocks share a multiprocessor, so that one reads while the other writes
constexpr int kRestThreads = 1024;        // of a block that has shared memory for itself
constexpr int kMaxRowCluster = 8;         // the largest that every Hopper card takes
constexpr int kRowsPerBlock = 4;          // where a warp takes a row
constexpr int64_t kRowOwnMemory = 16384;  // bytes of shared memory that rows may not take

struct HeldRowPlan {
  int held;            // vectors of each operand in each thread's registers
  bool rest;           // there are more
  int threads;         // of a block, side by side on a row
  int rows_per_block;  // more than one: each row has a warp
  int cluster;         // blocks on a row
  int64_t slice;       // vectors of each of them
  int shared = 0;      // of those the registers do not hold: vectors of each operand in shared memory
  int shared_bytes = 0;
  bool persistent = false;  // blocks take row after row
};

// Vectors a thread that registers have room for: 8 for kernels that keep one operand, 4 for two; half of it beside the rest.
constexpr int most_held(int operands, bool rest = false) { return (operands == 1 ? 8 : 4) / (rest ? 2 : 1); }

// Vectors of each operand that the shared memory of a block has room for.
inline int64_t most_shared(int operands, int64_t shared_memory) {
  return std::max<int64_t>(shared_memory - kRowOwnMemory, 0) / (16 * operands);
}

// `vectors`: of a row, each of which is one access (16 bytes, or `bytes` where rows are not aligned; then none in shared memory).
inline HeldRowPlan choose_row(int64_t vectors, int operands, int cluster, int64_t shared_memory, int bytes = 16) {
  HeldRowPlan p{.held = 1, .rest = false, .threads = 32, .rows_per_block = kRowsPerBlock, .cluster = cluster, .slice = vectors};
  if (cluster == 1) {
    while (p.held < 4 && p.held * 32 < vectors) p.held *= 2;
    if (p.held * 32 >= vectors) return p;
  } else {
    p.slice = ((vectors + cluster - 1) / cluster + 7) / 8 * 8;  // slices begin 128 bytes apart
    p.held = 2;                                                 // rather more threads
  }
  p.rows_per_block = 1;
  while (p.threads < kMaxRowThreads && p.held * p.threads < p.slice) p.threads *= 2;
  p.rest = int64_t{most_held(operands)} * p.threads < p.slice;
  p.persistent = cluster > 1 || p.rest;
  if (p.rest) p.threads = kRestThreads;
  if (p.persistent || p.held * p.threads < p.slice) p.held = most_held(operands, p.rest);
  if (p.rest && bytes == 16) {
    p.shared = static_cast<int>(std::clamp<int64_t>(p.slice - p.held * p.threads, 0, most_shared(operands, shared_memory)));
    p.shared_bytes = p.shared * 16 * operands;
  }
  return p;
}

// Blocks for a row of `vectors` in `rows` of them: as few as hold it, since exchanges between blocks cost more than shared memory does, and
// more where rows are too few to fill the machine.
inline int cluster_for(int64_t rows, int64_t vectors, int operands, const Machine& m) {
  const int64_t held = std::max(int64_t{kMaxRowThreads} * most_held(operands),
                                int64_t{kRestThreads} * most_held(operands, true) + most_shared(operands, m.shared_memory));
  int cluster = 1;
  while (cluster < kMaxRowCluster && cluster * held < vectors) cluster *= 2;
  while (cluster < kMaxRowCluster && rows * cluster * 2 <= m.multiprocessors && vectors / cluster >= 1024) cluster *= 2;
  return cluster;
}

inline std::string describe(const HeldRowPlan& p) {
  const std::string team = p.rows_per_block > 1 ? "a warp a row"
                                                : std::to_string(p.cluster) + (p.cluster > 1 ? " blocks" : " block") + " of " +
                                                      std::to_string(p.threads) + " threads a row";
  const bool again = p.rest && p.held * p.threads + p.shared < p.slice;
  return team + ", " + std::to_string(p.held) + " vectors a thread" +
         (p.shared > 0 ? ", " + std::to_string(p.shared) + " in shared memory" : "") + (again ? ", the rest read again" : "");
}

// 16-byte accesses need the rows of all operands to lie alike between the boundaries: then elements before the first and after the last
// boundary go one by one, and the vectors between are aligned in every operand.
inline const char* reject_unlike(int64_t rows, DType dtype, std::initializer_list<int64_t> strides,
                                 std::initializer_list<const void*> pointers) {
  const auto bytes = [&](int64_t elements) { return elements * size_of(dtype) % 16; };
  for (const int64_t stride : strides) {
    if (rows > 1 && bytes(stride) != bytes(*strides.begin())) return "rows of the operands differ in alignment";
  }
  for (const void* p : pointers) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    if (address % size_of(dtype) != 0) return "a pointer is not aligned to its type";
    if (address % 16 != reinterpret_cast<uintptr_t>(*pointers.begin()) % 16) return "the operands differ in alignment";
  }
  return nullptr;
}

}  // namespace liger
