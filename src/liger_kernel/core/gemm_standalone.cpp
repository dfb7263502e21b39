// gemm_portable: C in tiles, one at a time per thread. For each block of k, a tile packs its part of A and B as fp32 panels
// (kRows rows or kColumns columns beside each other, zero-padded), and a micro-kernel keeps a kRows x kColumns piece of the sum
// in vector registers. Packing reads an element once per tile, so its widening is paid once per 96 or 512 multiply-adds.
#include <algorithm>
#include <cstring>

#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/core/standalone.h>

namespace liger {
namespace {

constexpr int64_t kTileRows = 96, kTileColumns = 512, kBlock = 256;  // A 96 KiB, B 512 KiB, the sums 192 KiB: within L2

// acc[kRows, 2 kWidth] += a[k, kRows]^T b[k, 2 kWidth]. Two vectors of columns: with kRows = 6 (12 for 32 registers) the sums,
// b and one broadcast fill the registers. Every loop over them is unrolled, or GCC keeps the sums in memory (3x slower).
template <int kRows, int kWidth>
[[gnu::always_inline]] inline void multiply(const float* a, const float* b, float* acc, int64_t ld, int64_t k) {
  typedef float V __attribute__((vector_size(kWidth * 4)));
  typedef float Unaligned __attribute__((vector_size(kWidth * 4), aligned(4), may_alias));
  V sums[kRows][2] = {};
  for (; k > 0; --k, a += kRows, b += 2 * kWidth) {
    const V left = *reinterpret_cast<const Unaligned*>(b), right = *reinterpret_cast<const Unaligned*>(b + kWidth);
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      sums[i][0] += a[i] * left;
      sums[i][1] += a[i] * right;
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    *reinterpret_cast<Unaligned*>(acc + i * ld) += sums[i][0];
    *reinterpret_cast<Unaligned*>(acc + i * ld + kWidth) += sums[i][1];
  }
}

struct MicroKernel {
  int rows, columns;
  void (*run)(const float* a, const float* b, float* acc, int64_t ld, int64_t k);
};

void multiply_baseline(const float* a, const float* b, float* acc, int64_t ld, int64_t k) { multiply<6, 4>(a, b, acc, ld, k); }
#ifdef __x86_64__
__attribute__((target("avx2,fma"))) void multiply_avx2(const float* a, const float* b, float* acc, int64_t ld, int64_t k) {
  multiply<6, 8>(a, b, acc, ld, k);
}
__attribute__((target("avx512f,fma"))) void multiply_avx512(const float* a, const float* b, float* acc, int64_t ld, int64_t k) {
  multiply<12, 16>(a, b, acc, ld, k);
}
#endif

MicroKernel micro_kernel(int isa) {
#ifdef __x86_64__
  if (isa >= kAvx512) return {12, 32, multiply_avx512};
  if (isa >= kAvx2) return {6, 16, multiply_avx2};
#endif
  (void)isa;
  return {6, 8, multiply_baseline};
}

// Panels of `width` lines: panel[k][line] = source[first + line][k0 + k], zero beyond `lines`. A line is a row of op(a) or a
// column of op(b); `along` is the distance of two elements of a line, `across` of two lines.
template <class T>
void pack(const T* source, int64_t across, int64_t along, int64_t lines, int64_t count, int width, float* panel) {
  for (int64_t first = 0; first < lines; first += width, panel += count * width) {
    const int64_t filled = std::min<int64_t>(width, lines - first);
    const T* p = source + first * across;
    if (along == 1) {  // read along the lines
      for (int64_t line = 0; line < width; ++line) {
        for (int64_t k = 0; k < count; ++k) panel[k * width + line] = line < filled ? widen(p[line * across + k]) : 0.f;
      }
    } else {
      for (int64_t k = 0; k < count; ++k) {
        for (int64_t line = 0; line < width; ++line) panel[k * width + line] = line < filled ? widen(p[line * across + k * along]) : 0.f;
      }
    }
  }
}

// Rows [i, i + rows) and columns [j, j + columns) of c.
template <class T, class O>
void multiply_tile(const Gemm& g, const MicroKernel& micro, int64_t i, int64_t rows, int64_t j, int64_t columns, float* scratch) {
  const int64_t across_a = g.transpose_a ? 1 : g.lda, along_a = g.transpose_a ? g.lda : 1;
  const int64_t across_b = g.transpose_b ? g.ldb : 1, along_b = g.transpose_b ? 1 : g.ldb;
  float* sums = scratch;
  float* packed_a = sums + kTileRows * kTileColumns;
  float* packed_b = packed_a + kTileRows * kBlock;
  std::memset(sums, 0, kTileRows * kTileColumns * sizeof(float));
  for (int64_t k = 0; k < g.k; k += kBlock) {
    const int64_t count = std::min(kBlock, g.k - k);
    pack(static_cast<const T*>(g.a) + i * across_a + k * along_a, across_a, along_a, rows, count, micro.rows, packed_a);
    pack(static_cast<const T*>(g.b) + j * across_b + k * along_b, across_b, along_b, columns, count, micro.columns, packed_b);
    for (int64_t q = 0; q < columns; q += micro.columns) {
      for (int64_t p = 0; p < rows; p += micro.rows) {
        micro.run(packed_a + p * count, packed_b + q * count, sums + p * kTileColumns + q, kTileColumns, count);
      }
    }
  }
  for (int64_t p = 0; p < rows; ++p) {
    O* c = static_cast<O*>(g.c) + (i + p) * g.ldc + j;
    const float* s = sums + p * kTileColumns;
    for (int64_t q = 0; q < columns; ++q) c[q] = narrow<O>(g.beta == 0 ? g.alpha * s[q] : g.alpha * s[q] + g.beta * widen(c[q]));
  }
}

}  // namespace

void gemm_portable(const Gemm& g, const Host& host) {
  if (g.m <= 0 || g.n <= 0) return;
  const MicroKernel micro = micro_kernel(host.machine.floor);
  static_assert(kTileRows % 12 == 0 && kTileRows % 6 == 0 && kTileColumns % 32 == 0);
  const int64_t tiles_m = (g.m + kTileRows - 1) / kTileRows, tiles_n = (g.n + kTileColumns - 1) / kTileColumns;
  visit(g.in, [&]<class T>(Type<T>) {
    visit(g.out, [&]<class O>(Type<O>) {
      host.parallel_for(tiles_m * tiles_n, 1, [&](int64_t begin, int64_t end) {
        const Scratch scratch = host.scratch((kTileRows * kTileColumns + kBlock * (kTileRows + kTileColumns)) * sizeof(float));
        for (int64_t tile = begin; tile < end; ++tile) {  // down the columns of tiles, so that B's part stays in cache
          const int64_t i = tile % tiles_m * kTileRows, j = tile / tiles_m * kTileColumns;
          multiply_tile<T, O>(g, micro, i, std::min(kTileRows, g.m - i), j, std::min(kTileColumns, g.n - j), scratch.as<float>());
        }
      });
    });
  });
}

}  // namespace liger
