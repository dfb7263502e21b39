// How the vocabulary is cut, and in which type the products run.
#pragma once
#include <algorithm>
#include <string>
#include <string_view>

#include <liger_kernel/ops/fused_linear_log_probs/fused_linear_log_probs.h>

namespace liger::fused_linear_log_probs {

struct Plan {
  int64_t block;   // vocabulary entries of one product, and of one tile
  int64_t stride;  // row stride of the logits, a multiple of 8
  DType compute;   // of logits and of the operands of every product
  bool widen;      // x and weight are converted to fp32, weight a block at a time
};

constexpr int64_t kCudaTileBytes = int64_t{256} << 20;
constexpr int64_t kCudaSmallestTile = 2048, kCudaLargestTile = 16384;  // dx is read and written once a tile: it hides from 2048 on
// 512 x 896 x 151936 fp32, forward and backward: 6.4 s at 8 MiB, 5.5 at 16, 5.1 at 32, 5.4 at 64.
constexpr int64_t kCpuTileBytes = int64_t{32} << 20;
constexpr int64_t kCpuSmallestTile = 1024, kCpuLargestTile = 65536;
constexpr int64_t kWidenBytes = int64_t{8} << 20;    // of a block of weight in fp32
constexpr int64_t kProductBytes = int64_t{8} << 20;  // of a product before it is converted

inline int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }

// `tiled`: all rows and a block of columns at a time; otherwise all columns.
inline Plan choose(const Problem& a, const Machine& m, bool tiled) {
  const bool cuda = m.backend == Backend::kCuda;
  // torch's bf16 CPU products are two to three times as fast as sgemm where the CPU multiplies bf16 (AVX512-BF16), and many times
  // slower elsewhere. A forced variant of a lesser ISA means a lesser machine.
  const char* forced = cuda ? nullptr : forced_variant("fused_linear_log_probs");
  const bool bf16_machine = m.floor >= kAvx512 && (!forced || std::string_view(forced) == "cpu_avx512");
  Plan p{};
  p.widen = !cuda && a.dtype != DType::kF32 && !(a.dtype == DType::kBF16 && bf16_machine);
  p.compute = p.widen ? DType::kF32 : a.dtype;

  const int64_t vocab = std::max<int64_t>(a.vocab, 1);
  const int64_t widened = std::clamp(kWidenBytes / 4 / std::max<int64_t>(a.hidden, 1) / 64 * 64, int64_t{64}, round_up(vocab, 64));
  if (tiled) {
    const int64_t bytes = a.logits_bytes > 0 ? a.logits_bytes : cuda ? kCudaTileBytes : kCpuTileBytes;
    const int64_t fitting = bytes / (std::max<int64_t>(a.rows, 1) * size_of(p.compute)) / 256 * 256;
    p.block = cuda ? std::clamp(fitting, kCudaSmallestTile, kCudaLargestTile) : std::clamp(fitting, kCpuSmallestTile, kCpuLargestTile);
    if (p.widen) p.block = std::min(p.block, widened);
    // On the CPU rows a power of two apart would fall into the same cache sets.
    p.stride = round_up(std::min(p.block, vocab), 8) + (cuda ? 0 : 16);
  } else {
    p.block = p.widen ? widened : vocab;
    p.stride = round_up(vocab, 8);
  }
  return p;
}

// The block that begins at `begin`. An extent that is no multiple of 8 costs cuBLAS a factor of six at 16 bits, so the last
// vocab % 8 entries are a block of their own there.
inline int64_t block_size(const Plan& p, int64_t vocab, int64_t begin, const Machine& m) {
  const int64_t size = std::min(p.block, vocab - begin);
  return m.backend == Backend::kCuda && size > 8 ? size / 8 * 8 : size;
}

inline std::string describe(const Plan& p) {
  return "tiles of all rows and " + std::to_string(p.block) + " vocabulary entries, products in " + name(p.compute) +
         (p.widen ? ", weight widened a tile at a time" : "");
}

}  // namespace liger::fused_linear_log_probs
