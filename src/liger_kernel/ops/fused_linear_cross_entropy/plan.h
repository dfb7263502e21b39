// How the rows are cut into chunks, in which type the products run, and how the vocabulary is cut for them.
#pragma once
#include <algorithm>
#include <bit>
#include <string_view>

#include <liger_kernel/ops/fused_linear_cross_entropy/fused_linear_cross_entropy.h>

namespace liger::fused_linear_cross_entropy {

struct Plan {
  int64_t chunk_rows;
  int64_t chunks;
  int64_t logits_stride;  // row stride of the logits scratch, a multiple of 8
  int64_t block;          // rows of weight per product; blocks start at multiples of it
  DType compute;          // of logits and of the operands of every product
  DType accumulator;      // of dw while it is summed
  bool widen;             // weight and x are converted to fp32, a block and a chunk at a time
};

inline std::string describe(const Plan& p) {
  return std::to_string(p.chunks) + " chunks of " + std::to_string(p.chunk_rows) + " rows, products in " + name(p.compute) +
         ", dw summed in " + name(p.accumulator) + ", blocks of " + std::to_string(p.block) + " vocabulary entries";
}

constexpr int64_t kWholeTile = 128;     // rows of a chunk are a multiple of a GEMM tile's
constexpr int64_t kCudaLargest = 4096;  // reading and writing dw hides behind the products from about 2048 rows on
constexpr int64_t kCudaSmallest = 640;  // below it they show: 1.04 of the bare products at 640 rows, 1.08 and more at 512
constexpr int64_t kCudaLogitsBytes = int64_t{1280} << 20;
constexpr int64_t kCpuLogitsBytes = int64_t{64} << 20;
constexpr int64_t kCpuSmallest = 192;  // 1.04 of eager's time at 176 rows of 896 x 151936, 1.08 at 128
constexpr int64_t kCpuLargest = 1024;
constexpr int64_t kWidenBytes = int64_t{8} << 20;

inline int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

inline Plan choose(const ForwardArgs& a, const Machine& m, bool want_dw) {
  const bool cuda = m.backend == Backend::kCuda;
  // torch's bf16 CPU products are two to three times as fast as sgemm where the CPU multiplies bf16 (AVX512-BF16), and many times
  // slower elsewhere. A forced variant of a lesser ISA means a lesser machine.
  const char* forced = cuda ? nullptr : forced_variant("fused_linear_cross_entropy");
  const bool bf16_machine = m.floor >= kAvx512 && (!forced || std::string_view(forced) == "cpu_avx512");
  const bool native = cuda || a.dtype == DType::kF32 || (a.dtype == DType::kBF16 && bf16_machine);
  Plan p{};
  p.compute = native ? a.dtype : DType::kF32;
  p.widen = !native;

  const int64_t rows = a.valid_rows >= 0 ? a.valid_rows : a.rows, vocab = std::max<int64_t>(a.vocab, 1);
  const int64_t row_bytes = vocab * size_of(p.compute);
  const int64_t smallest = cuda ? kCudaSmallest : kCpuSmallest;
  int64_t chunk;
  if (a.logits_bytes > 0) {
    chunk = std::max(a.logits_bytes / row_bytes, smallest);
  } else {
    chunk = std::clamp((cuda ? kCudaLogitsBytes : kCpuLogitsBytes) / row_bytes, smallest, cuda ? kCudaLargest : kCpuLargest);
    if (a.chunk_mem > 1 && rows > 0) {
      const int64_t parts = (vocab + a.chunk_mem * a.hidden - 1) / (a.chunk_mem * a.hidden), wanted = (rows + parts - 1) / parts;
      chunk = std::max(chunk, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(wanted))));
    }
  }
  // dw is summed in fp32 and rounded once. One chunk sums it inside its product and needs no fp32 copy of it, so that while
  // rows * vocab logits take no more than chunk * vocab of them and that copy (4 bytes an entry, the result 2), all rows are one.
  const bool narrow_dw = want_dw && !p.widen && a.dw_result != DType::kF32;
  const bool low = narrow_dw && a.low_accumulation && cuda;
  if (narrow_dw && !low && rows <= chunk + a.hidden) chunk = std::max(chunk, rows);
  p.chunks = std::max<int64_t>((rows + chunk - 1) / chunk, 1);
  p.chunk_rows = (rows + p.chunks - 1) / p.chunks;
  if (p.chunks > 1) p.chunk_rows = std::min(round_up(p.chunk_rows, cuda ? kWholeTile : 8), rows);
  p.chunk_rows = std::max<int64_t>(p.chunk_rows, 1);
  p.chunks = std::max<int64_t>((rows + p.chunk_rows - 1) / p.chunk_rows, 1);
  p.accumulator = low || (narrow_dw && p.chunks == 1) ? a.dw_result : DType::kF32;

  // An extent that is no multiple of 8 costs cuBLAS a factor of six at 16 bits: padded rows, and the last vocab % 8 columns apart.
  p.logits_stride = round_up(vocab, 8);
  p.block = vocab;
  if (cuda && vocab > 8) p.block = vocab / 8 * 8;
  if (p.widen) p.block = std::clamp(kWidenBytes / 4 / std::max<int64_t>(a.hidden, 1) / 64 * 64, int64_t{64}, round_up(vocab, 64));
  return p;
}

// 16-byte copies of whole rows, or conversion from fp32 to 16 bits by vectors of 8.
inline const char* reject_vectors(const MoveArgs& a, const Machine&) {
  if (a.accumulate) return "does not accumulate";
  if (a.src_dtype != a.dst_dtype && !(a.src_dtype == DType::kF32 && !a.src_row && !a.dst_row)) return "does not convert these";
  const int64_t element = size_of(a.dst_dtype), source = size_of(a.src_dtype);
  if (reinterpret_cast<uintptr_t>(a.src) % 16 || reinterpret_cast<uintptr_t>(a.dst) % 16) return "a pointer is not 16-byte aligned";
  if (a.cols * element % 16 || a.src_stride * source % 16 || a.dst_stride * element % 16) return "rows are not whole 16-byte vectors";
  return nullptr;
}
inline const char* reject_conversion(const MoveArgs& a, const Machine&) {
  if (a.accumulate) return "does not accumulate";
  return a.src_dtype == a.dst_dtype || a.src_dtype == DType::kF32 ? nullptr : "does not convert these";
}

}  // namespace liger::fused_linear_cross_entropy
