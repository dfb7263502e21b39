// How the rows are cut into chunks, in which type the products run, how the vocabulary is cut for them, and how the CUDA kernels cover
// a row.
#pragma once
#include <algorithm>
#include <string>
#include <string_view>

#include <liger_kernel/ops/fused_linear_jsd/fused_linear_jsd.h>

namespace liger::fused_linear_jsd {

constexpr const char* kOp = "fused_linear_jsd";

// --- chunks ------------------------------------------------------------------------------------------------------------------
struct Plan {
  int64_t chunk_rows, chunks;
  DType compute;      // of logits and of the operands of every product
  DType accumulator;  // of dw while it is summed
  bool widen;         // weights and inputs are converted to fp32, a block and a chunk at a time
};

constexpr int64_t kWholeTile = 128;     // rows of a chunk are a multiple of a GEMM tile's
constexpr int64_t kCudaLargest = 4096;  // reading and writing dw hides behind the products from about 2048 rows on
constexpr int64_t kCudaSmallest = 640;
constexpr int64_t kCudaLogitsBytes = int64_t{1280} << 20;  // of both scratches
constexpr int64_t kCpuLogitsBytes = int64_t{128} << 20;
constexpr int64_t kCpuSmallest = 96, kCpuLargest = 1024;
constexpr int64_t kWidenBytes = int64_t{8} << 20;

inline int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

inline int64_t logits_stride(int64_t vocab) { return round_up(vocab, 8); }

// Rows of weight per product; blocks start at multiples of it. An extent that is no multiple of 8 costs cuBLAS a factor of six at 16
// bits: the last vocab % 8 columns go apart.
inline int64_t block_of(const Head& head, const Plan& p, const Machine& m) {
  if (p.widen) return std::clamp(kWidenBytes / 4 / std::max<int64_t>(head.hidden, 1) / 64 * 64, int64_t{64}, round_up(head.vocab, 64));
  return m.backend == Backend::kCuda && head.vocab > 8 ? head.vocab / 8 * 8 : head.vocab;
}

inline Plan choose(const ForwardArgs& a, const Machine& m, bool want_dw) {
  const bool cuda = m.backend == Backend::kCuda;
  // torch's bf16 CPU products are two to three times as fast as sgemm where the CPU multiplies bf16 (AVX512-BF16), and many times
  // slower elsewhere. A forced variant of a lesser ISA means a lesser machine.
  const char* forced = cuda ? nullptr : forced_variant(kOp);
  const bool bf16_machine = m.floor >= kAvx512 && (!forced || std::string_view(forced) == "cpu_avx512");
  Plan p{};
  p.widen = !cuda && a.dtype != DType::kF32 && !(a.dtype == DType::kBF16 && bf16_machine);
  p.compute = p.widen ? DType::kF32 : a.dtype;

  const int64_t rows = a.valid_rows >= 0 ? a.valid_rows : a.rows, vocab = std::max<int64_t>(a.student.vocab, 1);
  const int64_t teacher = a.loss.divergence == Divergence::kProbabilities ? 0 : logits_stride(a.teacher.vocab);
  const int64_t row_bytes = (logits_stride(vocab) + teacher) * size_of(p.compute);
  const int64_t bytes = a.logits_bytes > 0 ? a.logits_bytes : cuda ? kCudaLogitsBytes : kCpuLogitsBytes;
  int64_t chunk = std::clamp(bytes / row_bytes, cuda ? kCudaSmallest : kCpuSmallest, cuda ? kCudaLargest : kCpuLargest);
  // One chunk sums dw inside its product and needs no fp32 copy of it (4 bytes an entry, of which the result takes 2 afterwards): where
  // the logits of all rows take no more beyond a chunk's than that copy, they are one chunk.
  const bool narrow_dw = want_dw && !p.widen && a.dw_result != DType::kF32;
  if (narrow_dw && (rows - chunk) * row_bytes <= 2 * vocab * a.student.hidden) chunk = std::max(chunk, rows);
  p.chunks = std::max<int64_t>((rows + chunk - 1) / chunk, 1);
  p.chunk_rows = (rows + p.chunks - 1) / p.chunks;
  if (p.chunks > 1) p.chunk_rows = std::min(round_up(p.chunk_rows, cuda ? kWholeTile : 8), rows);
  p.chunk_rows = std::max<int64_t>(p.chunk_rows, 1);
  p.chunks = std::max<int64_t>((rows + p.chunk_rows - 1) / p.chunk_rows, 1);
  p.accumulator = narrow_dw && p.chunks == 1 ? a.dw_result : DType::kF32;
  return p;
}

inline std::string describe(const Plan& p) {
  return std::to_string(p.chunks) + " chunks of " + std::to_string(p.chunk_rows) + " rows, products in " + name(p.compute) +
         ", dw summed in " + name(p.accumulator);
}

// --- the pass over a row on CUDA ---------------------------------------------------------------------------------------------
constexpr int kThreads = 512;
constexpr int64_t kShortRow = 512;         // vectors; below, several passes from L1 cost no more
constexpr int64_t kReservedShared = 6144;  // bytes beside the rows: partial sums of all blocks, and the system's share

// Both rows lie in the shared memory of a cluster of blocks, `slice` vectors of each row in each. cluster 0: they do not fit.
struct ReadOnce {
  int cluster, slice;
};

// The smallest cluster that leaves room for a second block on each multiprocessor, so that one loads while the other computes; for
// wider rows, a block alone.
inline ReadOnce choose_read_once(const DivergenceArgs& a, const Machine& m) {
  const int64_t vectors = (a.vocab * size_of(a.dtype) + 15) / 16;
  for (const int64_t room : {(m.shared_memory + 1024) / 2 - kReservedShared, m.shared_memory - kReservedShared}) {
    for (int cluster = 1; cluster <= 8; cluster *= 2) {
      const int64_t slice = round_up((vectors + cluster - 1) / cluster, 8);  // slices begin on 128-byte boundaries
      if (slice * 32 <= room) return {cluster, static_cast<int>(slice)};
    }
  }
  return {0, 0};
}

inline const char* reject_read_once(const DivergenceArgs& a, const Machine& m) {
  const int64_t size = size_of(a.dtype);
  if (m.floor >= 100) return "built for SM 9.0 alone";
  if (a.loss.divergence != Divergence::kJensenShannon) return "for the Jensen-Shannon divergence alone";
  if (a.vocab != a.teacher_vocab) return "the vocabularies differ";
  if (a.vocab * size / 16 < kShortRow) return "short rows";
  if (reinterpret_cast<uintptr_t>(a.student) % 16 || reinterpret_cast<uintptr_t>(a.teacher) % 16) return "a pointer is not 16-byte aligned";
  for (const int64_t stride : {a.student_stride, a.teacher_stride}) {
    if (stride * size % 16) return "rows do not begin on 16-byte boundaries";
    if (stride < round_up(a.vocab, 16 / size)) return "a row's last vector reaches into the next row";
  }
  return choose_read_once(a, m).cluster == 0 ? "two rows do not fit in the shared memory of 8 blocks" : nullptr;
}

inline int threads_for(int64_t cols) {
  int threads = 32;
  while (threads < kThreads && threads * 32 <= cols) threads *= 2;
  return threads;
}

}  // namespace liger::fused_linear_jsd
