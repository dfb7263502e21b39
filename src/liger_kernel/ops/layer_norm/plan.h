// How the CUDA kernels cover a row.
#pragma once
#include <algorithm>
#include <initializer_list>

#include <liger_kernel/ops/layer_norm/layer_norm.h>

namespace liger::layer_norm {

constexpr int kMaxThreads = 1024;
constexpr int kMaxForwardThreads = 512;
constexpr int kMaxVectors = 8;  // 16-byte vectors of a row that a thread of the forward holds
constexpr int kMaxStages = 3;   // rows of x and dy that a block of the backward has in shared memory

// Forward: a block takes a row, `threads` x `vectors` (a template argument: 4 or 8) vectors of 16 bytes.
struct ForwardPlan {
  int threads, vectors;
};

// Backward: `blocks` stay for all their rows. A thread owns `elements` columns (a template argument: 8 or 16) and their sums of
// dw and db; `stages` rows of x and dy are in flight.
struct BackwardPlan {
  int threads, elements, stages, blocks;
  int64_t stage_bytes;
};

inline std::string describe(const ForwardPlan& p) {
  return std::to_string(p.threads) + " threads x " + std::to_string(p.vectors) + " vectors of 16 bytes, one block a row";
}
inline std::string describe(const BackwardPlan& p) {
  return std::to_string(p.threads) + " threads x " + std::to_string(p.elements) + " columns, " + std::to_string(p.stages) + " stages of " +
         std::to_string(p.stage_bytes) + " bytes, " + std::to_string(p.blocks) + " blocks";
}

// One warp, or an even number of them: block_sum2 reads the warps' sums in pairs.
inline int threads_for(int64_t needed) {
  if (needed <= 32) return 32;
  return static_cast<int>(std::min<int64_t>((needed + 63) / 64 * 64, kMaxThreads));
}

// Few threads with many vectors each, as core/rms.h measured it: small blocks do not wait for one another.
inline ForwardPlan choose(const ForwardArgs& a) {
  const int64_t vectors = (a.cols * size_of(a.dtype) + 15) / 16;
  const int each = vectors < 1024 ? 4 : kMaxVectors;
  return {.threads = threads_for((vectors + each - 1) / each), .vectors = each};
}

// What a block may take beside its staged rows: the 1 KiB that CUDA reserves, and the scratch of its reductions.
constexpr int64_t kReservedShared = 2048;

// About 512 threads a multiprocessor with 16 columns each, or 1024 with 8: the registers of their sums (2 a column) and weights
// bound them, and few blocks write few partial rows. Fewer blocks where one could not have its next row under way.
inline BackwardPlan choose(const BackwardArgs& a, const Machine& m) {
  BackwardPlan p{};
  p.elements = a.cols <= 256 * 8 ? 8 : 16;
  p.threads = threads_for((a.cols + p.elements - 1) / p.elements);
  p.stage_bytes = int64_t{2} * p.threads * p.elements * size_of(a.dtype);
  int resident = std::clamp((p.elements == 8 ? 1024 : 640) / p.threads, 1, 8);
  const auto stages = [&] { return ((m.shared_memory + 1024) / resident - kReservedShared) / p.stage_bytes; };
  while (resident > 1 && stages() < 2) --resident;
  p.stages = static_cast<int>(std::clamp<int64_t>(stages(), 0, kMaxStages));
  p.blocks = static_cast<int>(std::clamp<int64_t>(a.rows, 1, int64_t{m.multiprocessors} * resident));
  return p;
}

inline const char* reject_shape(int64_t cols, DType dtype, std::initializer_list<int64_t> strides,
                                std::initializer_list<const void*> pointers) {
  if (cols * size_of(dtype) % 16 != 0) return "a row is not a multiple of 16 bytes";
  for (int64_t stride : strides) {
    if (stride * size_of(dtype) % 16 != 0) return "rows are not 16-byte aligned";
  }
  for (const void* p : pointers) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return "a pointer is not 16-byte aligned";
  }
  return nullptr;
}
inline const char* reject_weight(DType dtype, DType weight_dtype) {
  return weight_dtype == dtype || weight_dtype == DType::kF32 ? nullptr : "weight is neither x's type nor fp32";
}
inline const char* reject_registers(const ForwardArgs& a, const Machine&) {
  if (const char* reason = reject_weight(a.dtype, a.weight_dtype)) return reason;
  if (a.weight && a.bias && a.weight_dtype != a.bias_dtype) return "weight and bias differ in type";
  if (a.cols * size_of(a.dtype) > int64_t{kMaxForwardThreads} * kMaxVectors * 16) return "a row does not fit in one block's registers";
  return reject_shape(a.cols, a.dtype, {a.x_stride, a.y_stride}, {a.x, a.y, a.weight, a.bias});
}
inline const char* reject_staged(const BackwardArgs& a, const Machine& m) {
  if (const char* reason = reject_weight(a.dtype, a.weight_dtype)) return reason;
  if (a.cols > int64_t{kMaxThreads} * 16) return "the sums of dw and db do not fit in one block's registers";
  if (choose(a, m).stages < 1) return "a row of x and dy does not fit in one block's shared memory";
  return reject_shape(a.cols, a.dtype, {a.x_stride, a.dy_stride, a.dx_stride}, {a.x, a.dy, a.dx, a.weight});
}

}  // namespace liger::layer_norm
