// What rms_norm and fused_add_rms_norm share: where values are rounded, and how the CUDA kernels cover a row. The kernels are in
// cuda/rms.cuh.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <string>

#include <liger_kernel/core/variant.h>

namespace liger {

enum class Rounding : int8_t {
  kEachStep = -1,     // rstd, weight + offset and every product rounded to x's type
  kBeforeWeight = 0,  // x * rstd rounded, then the weight multiplied in fp32, one rounding at the store (Llama)
  kLast = 1,          // everything fp32, one rounding at the store (Gemma, OLMo)
};

// `lanes` threads hold `vectors` 16-byte vectors of a row each. Up to 32 lanes are neighbours in a warp, and a block takes several
// rows; more are a block.
struct RowPlan {
  int lanes, vectors, threads;
  int blocks = 0;      // persistent ones; 0: as many as the rows need
  int stages = 0;      // rows on their way or worked on, in shared memory; 0: none, the row is in registers
  int64_t shared = 0;  // bytes of all stages
};

inline std::string describe(const RowPlan& p) {
  return std::to_string(p.lanes) + " threads a row x " + std::to_string(p.vectors) + " vectors of 16 bytes, " +
         (p.blocks ? std::to_string(p.blocks) + " blocks, " + std::to_string(p.stages) + " rows staged"
                   : std::to_string(p.threads / p.lanes) + " rows a block");
}

constexpr int kRowMaxForwardThreads = 512;
constexpr int kRowMaxThreads = 1024;
constexpr int64_t kRowMaxVectors = 4096;  // 64 KB
constexpr int64_t kRowOwnShared = 256;    // bytes of shared memory that the kernels' sums take

inline int64_t row_vectors(int64_t cols, DType dtype) { return (cols * size_of(dtype) + 15) / 16; }

// The fewest threads, a power of two within a warp and a multiple of 32 beyond, whose `vectors` cover a row.
inline RowPlan cover_row(int64_t needed, int vectors, int warp_rows_threads) {
  const int64_t lanes = (needed + vectors - 1) / vectors;
  if (lanes > 32) return {.lanes = int((lanes + 31) / 32 * 32), .vectors = vectors, .threads = int((lanes + 31) / 32 * 32)};
  int power = 1;
  while (power < lanes) power *= 2;
  return {.lanes = power, .vectors = vectors, .threads = warp_rows_threads};
}

// Few threads with many vectors each: small blocks do not wait for one another. H200, bf16, 16384 x 4096: 128 x 4 68 us,
// 256 x 2 76, 512 x 1 110; 4096 x 16384: 256 x 8 70, 512 x 4 73, 1024 x 2 110.
inline RowPlan plan_rows_forward(int64_t cols, DType dtype) {
  const int64_t needed = row_vectors(cols, dtype);
  return cover_row(needed, needed <= 4 ? 1 : needed <= 64 ? 2 : needed < 1024 ? 4 : 8, 128);
}

// Persistent blocks keep their share of dw in registers and its partial row short of the finishing kernel's time: one or two
// vectors a thread, about 512 threads a multiprocessor. 16384 x 4096: two blocks of 256 x 2 105 us, three 112, 128 x 4 112-120.
// `streams` rows are read at a time. As many stages as have room, three at most: the fourth gains nothing.
inline RowPlan plan_rows_backward(int64_t rows, int64_t cols, DType dtype, int streams, const Machine& m) {
  constexpr int64_t kSystem = 1024;  // bytes of each block's shared memory that the system takes
  constexpr int kMaxStages = 3;
  const int64_t needed = row_vectors(cols, dtype);
  RowPlan p = needed <= 32    ? cover_row(needed, 1, 256)
              : needed <= 64  ? cover_row(needed, 2, 256)
              : needed <= 128 ? cover_row(needed, 4, 128)
              : needed <= 256 ? cover_row(needed, 1, 256)
                              : cover_row(needed, needed <= 2048 ? 2 : 4, 256);
  const int64_t stage = int64_t{16} * streams * p.vectors * p.threads;
  const auto fit = [&](int blocks) { return ((m.shared_memory + kSystem) / blocks - kSystem - kRowOwnShared) / stage; };
  int per_multiprocessor = std::clamp((p.vectors == 1 ? 1024 : 640) / p.threads, 1, 8);
  while (per_multiprocessor > 1 && fit(per_multiprocessor) < 2) --per_multiprocessor;
  p.stages = static_cast<int>(std::min<int64_t>(fit(per_multiprocessor), kMaxStages));
  p.shared = p.stages * stage;
  const int64_t turns = (rows + p.threads / p.lanes - 1) / (p.threads / p.lanes);
  p.blocks = static_cast<int>(std::clamp<int64_t>(turns, 1, std::max(1, m.multiprocessors * per_multiprocessor)));
  return p;
}

// nullptr when rows are whole, aligned vectors and not too many of them.
inline const char* reject_rows(int64_t cols, DType dtype, DType weight_dtype, std::initializer_list<int64_t> strides,
                               std::initializer_list<const void*> pointers) {
  if (weight_dtype != dtype && weight_dtype != DType::kF32) return "weight is neither x's type nor fp32";
  if (cols * size_of(dtype) % 16 != 0) return "a row is not a multiple of 16 bytes";
  if (row_vectors(cols, dtype) > kRowMaxVectors) return "a row is wider than a block's threads hold";
  for (const int64_t stride : strides) {
    if (stride * size_of(dtype) % 16 != 0) return "rows are not 16-byte aligned";
  }
  for (const void* p : pointers) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return "a pointer is not 16-byte aligned";
  }
  return nullptr;
}

}  // namespace liger
