// How the CUDA kernels cover a row.
#pragma once
#include <string>

#include <liger_kernel/ops/cross_entropy/cross_entropy.h>

namespace liger::cross_entropy {

// --- two passes: one block a row ---------------------------------------------------------------------------------------------
constexpr int kMaxThreads = 512;

// At least two 16-byte vectors a thread before a block grows.
inline int two_pass_threads(int64_t vocab, DType dtype) {
  const int64_t vectors = vocab * size_of(dtype) / 16;
  int threads = 32;
  while (threads < kMaxThreads && threads * 2 < vectors) threads *= 2;
  return threads;
}

// --- row read once: a cluster of blocks holds it ----------------------------------------------------------------------------
// Each block holds threads x vectors 16-byte vectors in registers and, with `shared`, more in shared memory. Best first: the
// smallest cluster that fits was the fastest, and a part in shared memory beats registers alone (8192 x 128256 bf16 on an H200:
// 2 x 768 x 10 and shared 1045 us, 2 x 1024 x 8 1054); `persistent` clusters take row after row, which hides their start-up.
struct Layout {
  int cluster, threads, vectors;
  bool shared, persistent;
  int blocks;  // per multiprocessor
};
constexpr Layout kLayouts[] = {
    {.cluster = 1, .threads = 512, .vectors = 4, .shared = false, .persistent = false, .blocks = 2},
    {.cluster = 1, .threads = 512, .vectors = 8, .shared = false, .persistent = false, .blocks = 2},
    {.cluster = 1, .threads = 1024, .vectors = 7, .shared = false, .persistent = true, .blocks = 1},
    {.cluster = 1, .threads = 1024, .vectors = 8, .shared = false, .persistent = true, .blocks = 1},
    {.cluster = 2, .threads = 768, .vectors = 10, .shared = true, .persistent = true, .blocks = 1},
    {.cluster = 4, .threads = 768, .vectors = 10, .shared = true, .persistent = true, .blocks = 1},
    {.cluster = 8, .threads = 640, .vectors = 12, .shared = true, .persistent = true, .blocks = 1},
};
constexpr int kLayoutCount = sizeof(kLayouts) / sizeof(Layout);
constexpr int64_t kShortRow = 512;          // vectors; below, two passes from L1 cost no more
constexpr int64_t kReservedShared = 16384;  // bytes beside the row: the exchange between warps, and the system's share

struct ReadOnce {
  int layout;        // index into kLayouts
  bool aligned;      // rows begin and end on 16-byte boundaries
  int slice;         // vectors of a row for each block
  int shared_bytes;  // of them in shared memory
};

inline std::string describe(const ReadOnce& p) {
  const Layout& l = kLayouts[p.layout];
  return "row read once by a cluster of " + std::to_string(l.cluster) + ", " + std::to_string(l.threads) + " threads x " +
         std::to_string(l.vectors) + " vectors of 16 bytes" +
         (l.shared ? " and " + std::to_string(p.shared_bytes) + " bytes of shared memory" : std::string()) +
         (l.persistent ? ", persistent" : ", one block a row");
}

inline bool aligned_rows(const ForwardArgs& a) {
  const int64_t size = size_of(a.dtype);
  return a.vocab * size % 16 == 0 && a.logits_stride * size % 16 == 0 && reinterpret_cast<uintptr_t>(a.logits) % 16 == 0;
}

// layout -1: the row fits none.
inline ReadOnce choose_read_once(const ForwardArgs& a, int64_t shared_memory) {
  const int64_t per_vector = 16 / size_of(a.dtype);
  ReadOnce p{.layout = -1, .aligned = aligned_rows(a), .slice = 0, .shared_bytes = 0};
  const int64_t vectors = a.vocab / per_vector;  // fewer where a row begins beside a 16-byte boundary
  for (int i = 0; i < kLayoutCount && p.layout < 0; ++i) {
    const Layout& l = kLayouts[i];
    const int64_t slice = ((vectors + l.cluster - 1) / l.cluster + 7) / 8 * 8;  // slices begin on 128-byte boundaries
    const int64_t held = int64_t{l.threads} * l.vectors;
    const int64_t rest = slice > held ? slice - held : 0;
    if (rest * 16 > (l.shared ? shared_memory - kReservedShared : 0)) continue;
    p.layout = i;
    p.slice = static_cast<int>(slice);
    p.shared_bytes = static_cast<int>(rest * 16);
  }
  return p;
}

inline const char* reject_read_once(const ForwardArgs& a, const Machine& m) {
  if (m.floor >= 100) return "built for SM 9.0 alone";
  if (a.softcap > 0 || a.logit_scale != 1) return "the logits are capped or scaled";
  if (a.label_smoothing > 0 && a.class_weight) return "smoothing with class weights";
  if (a.hit || a.prediction) return "the index of the largest logit is wanted";
  const int64_t size = size_of(a.dtype);
  if (a.vocab * size / 16 < kShortRow) return "short rows";
  if (a.grad && ((reinterpret_cast<intptr_t>(a.grad) - reinterpret_cast<intptr_t>(a.logits)) % 16 != 0 ||
                 (a.grad_stride - a.logits_stride) * size % 16 != 0)) {
    return "logits and gradient differ in alignment";
  }
  return choose_read_once(a, m.shared_memory).layout < 0 ? "a row does not fit in the registers and shared memory of 8 blocks" : nullptr;
}

}  // namespace liger::cross_entropy
