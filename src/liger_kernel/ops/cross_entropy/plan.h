// How the CUDA kernels cover a row.
#pragma once
#include <string>

#include <liger_kernel/ops/cross_entropy/cross_entropy.h>

namespace liger::cross_entropy {

constexpr int kMaxThreads = 512;

struct Plan {
  int threads;
};

inline std::string describe(const Plan& p) { return "one block of " + std::to_string(p.threads) + " threads a row, two passes"; }

// At least two 16-byte vectors a thread before a block grows.
inline Plan choose(int64_t vocab, DType dtype) {
  const int64_t vectors = vocab * size_of(dtype) / 16;
  int threads = 32;
  while (threads < kMaxThreads && threads * 2 < vectors) threads *= 2;
  return {.threads = threads};
}

}  // namespace liger::cross_entropy
