// Cross entropy on CUDA for any width, type, alignment and option.
//
// forward_two_pass: one block a row. It reads the row for the sums, then reads it again, from its end, so that what is still
//   in L2 comes first, and writes the gradient. The row's aligned middle goes in 16-byte vectors, the elements before
//   and after it one by one. The target's column is left out of the sums. One barrier a row.
// label_stats, totals: one block, one launch, fixed order of addition, so that results repeat bit for bit.
// scale: looks at the factor on the device and leaves without touching memory when it is 1 and the gradient stays in place.
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/element.cuh>
#include <liger_kernel/core/cuda/overlap.cuh>
#include <liger_kernel/ops/cross_entropy/plan.h>

namespace liger::cross_entropy {
namespace {

#include <liger_kernel/ops/cross_entropy/finish.inl.h>

constexpr int kMaxWarps = kMaxThreads / 32;

// 2^x, relative error 2^-22.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * kLog2e); }

// A row's columns: `head` single ones up to a 16-byte boundary, `vectors` vectors, the rest single.
template <class T>
struct Columns {
  __device__ Columns(const T* p, int64_t cols) : cols(cols) {
    const int64_t before = (16 - reinterpret_cast<uintptr_t>(p) % 16) % 16 / sizeof(T);
    head = before < cols ? before : cols;
    vectors = (cols - head) / Vec<T>::kSize;
    tail = head + vectors * Vec<T>::kSize;
  }
  // f(column) of this thread's single columns: fewer than 8 before and after the vectors.
  template <class F>
  __device__ __forceinline__ void singles(F&& f) const {
    for (int64_t j = threadIdx.x; j < head; j += blockDim.x) f(j);
    for (int64_t j = tail + threadIdx.x; j < cols; j += blockDim.x) f(j);
  }
  int64_t cols, head, vectors, tail;
};

// x of a logit and its derivative. kPlain: neither soft cap nor scale.
template <bool kPlain>
struct Transform {
  __device__ explicit Transform(const ForwardArgs& a)
      : scale(a.logit_scale),
        cap(a.softcap),
        inner(a.softcap > 0 ? a.logit_scale / a.softcap : 0.f),
        inverse_cap(a.softcap > 0 ? 1 / a.softcap : 0.f) {}
  __device__ __forceinline__ float operator()(float logit) const {
    if constexpr (kPlain) return logit;
    return cap > 0 ? tanhf(logit * inner) * cap : logit * scale;
  }
  __device__ __forceinline__ float slope(float x) const {
    const float t = x * inverse_cap;
    return (1 - t * t) * scale;
  }
  float scale, cap, inner, inverse_cap;
};

// One thread's, warp's or block's share of a row.
struct Share {
  float largest = -INFINITY;  // without the target's column
  float others = 0;           // sum of exp(x - largest), largest taken as 0 while it is -inf
  float weighted = 0;
  unsigned long long best = 0;  // of all columns: order of x above, complement of the column below, so that the first wins
};

// Monotonic in x; NaN above all.
__device__ __forceinline__ unsigned long long best_key(float x, uint32_t column) {
  const int32_t bits = __float_as_int(x);
  const uint32_t ordered = x != x ? ~0u : static_cast<uint32_t>(bits < 0 ? ~bits : bits ^ 0x80000000);
  return static_cast<unsigned long long>(ordered) << 32 | ~column;
}

__device__ __forceinline__ float finite(float largest) { return largest == -INFINITY ? 0.f : largest; }

// kCount values of x, the target's set to -inf, into the share.
template <int kCount>
__device__ __forceinline__ void add(Share& share, const float (&x)[kCount]) {
  float m = share.largest;
#pragma unroll
  for (int i = 0; i < kCount; ++i) m = fmaxf(m, x[i]);
  if (m > share.largest) {
    share.others *= exp_fast(share.largest - m);
    share.largest = m;
  }
  const float base = finite(m);
#pragma unroll
  for (int i = 0; i < kCount; ++i) share.others += exp_fast(x[i] - base);
}

// exp(from - to), 1 for equal infinities.
__device__ __forceinline__ float ratio_fast(float from, float to) { return from == to ? 1.f : exp_fast(from - to); }

__device__ __forceinline__ void merge(Share& a, const Share& b) {
  const float m = fmaxf(a.largest, b.largest);
  a.others = a.others * ratio_fast(a.largest, m) + b.others * ratio_fast(b.largest, m);
  a.largest = m;
  a.weighted += b.weighted;
  a.best = a.best > b.best ? a.best : b.best;
}

template <bool kPlain>
__device__ __forceinline__ Share warp_merge(Share share) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    Share other;
    other.largest = __shfl_xor_sync(~0u, share.largest, lanes);
    other.others = __shfl_xor_sync(~0u, share.others, lanes);
    if constexpr (!kPlain) {
      other.weighted = __shfl_xor_sync(~0u, share.weighted, lanes);
      other.best = __shfl_xor_sync(~0u, share.best, lanes);
    }
    merge(share, other);
  }
  return share;
}

// Every thread gets the block's share; one barrier.
template <bool kPlain>
__device__ __forceinline__ Share block_merge(Share share, Share* scratch) {
  share = warp_merge<kPlain>(share);
  const int warps = blockDim.x / 32;
  if (warps == 1) {
    __syncwarp();  // orders the reads of the row before the writes of its gradient
    return share;
  }
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = share;
  __syncthreads();
  Share all = scratch[0];
  for (int w = 1; w < warps; ++w) merge(all, scratch[w]);
  return all;
}

// kPlain: no soft cap, scale, smoothing (weights act on the target alone then), hit or prediction.
template <class T, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads) forward_two_pass(ForwardArgs a) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ Share scratch[2][kMaxWarps];
  const Transform<kPlain> transform(a);
  const bool smooth = !kPlain && a.label_smoothing > 0, track = !kPlain && (a.hit || a.prediction);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
    T* grad = a.grad ? static_cast<T*>(a.grad) + row * a.grad_stride : nullptr;
    const int64_t y = a.target[row * a.target_stride];
    const Columns<T> columns(logits, a.vocab);
    // Vectors are stored where the gradient's row has the logits' alignment.
    const bool vector_store = reinterpret_cast<uintptr_t>(grad) % 16 == reinterpret_cast<uintptr_t>(logits) % 16;

    // 1. Rows without a valid target: constants.
    const bool ignored = y == a.ignore_index;
    if (ignored || y < 0 || y >= a.vocab) {
      const float value = ignored ? 0.f : NAN;
      if (grad) {
        const Columns<T> out(grad, a.vocab);
        float values[kSize];
#pragma unroll
        for (int i = 0; i < kSize; ++i) values[i] = value;
        out.singles([&](int64_t j) { grad[j] = narrow<T>(value); });
        for (int64_t v = threadIdx.x; v < out.vectors; v += blockDim.x) Vec<T>::from_float(values).store(grad + out.head + v * kSize);
      }
      if (threadIdx.x == 0) {
        a.loss[row] = value;
        if (a.z_loss) a.z_loss[row] = value;
        if (a.hit) a.hit[row] = 0;
        if (a.prediction) a.prediction[row] = -1;
      }
      continue;
    }

    // 2. Sums. Every thread reads the target's logit now: it may be overwritten after the barrier.
    RowSums sums{.target = transform(widen(logits[y]))};
    Share share;
    const auto take = [&]<int kCount>(int64_t column, float(&x)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = transform(x[i]);
        if (smooth) share.weighted += a.class_weight ? x[i] * a.class_weight[column + i] : x[i];
        if (track) {
          const auto key = best_key(x[i], static_cast<uint32_t>(column + i));
          share.best = key > share.best ? key : share.best;
        }
      }
      if (y - column >= 0 && y - column < kCount) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] = column + i == y ? -INFINITY : x[i];
      }
      add(share, x);
    };
    columns.singles([&](int64_t j) {
      float x[1] = {widen(logits[j])};
      take(j, x);
    });
    const T* body = logits + columns.head;
#pragma unroll 4
    for (int64_t v = threadIdx.x; v < columns.vectors; v += blockDim.x) {
      float x[kSize];
      Vec<T>::load(body + v * kSize).to_float(x);
      take(columns.head + v * kSize, x);
    }
    share = block_merge<kPlain>(share, scratch[turn]);
    sums.largest = share.largest;
    sums.others = share.others;
    sums.weighted = share.weighted;

    // 3. The row's results.
    const Row<> result(a, *a.stats, row, y, sums);
    if (threadIdx.x == 0) {
      a.loss[row] = result.loss();
      if (a.z_loss) a.z_loss[row] = result.z_loss();
      const int64_t first = ~static_cast<uint32_t>(share.best);
      if (a.hit) a.hit[row] = first == y ? 1.f : 0.f;
      if (a.prediction) a.prediction[row] = first;
    }
    if (!grad) continue;

    // 4. Gradient. Each element is written by the thread that reads it, so grad may be the logits.
    const RowGradient r = result.gradient();
    const float own = result.own();
    const auto derive = [&](int64_t column, float logit) {
      const float x = transform(logit);
      float d = column == y ? own : exp_fast(x - r.top) * r.scale;
      if constexpr (!kPlain) {
        if (smooth && column != y) d -= a.class_weight ? r.shift * a.class_weight[column] : r.shift;
        d *= transform.slope(x);
      }
      return d;
    };
#pragma unroll 2
    for (int64_t v = columns.vectors - 1 - threadIdx.x; v >= 0; v -= blockDim.x) {
      const int64_t column = columns.head + v * kSize;
      float x[kSize];
      Vec<T>::load(body + v * kSize).to_float(x);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] = derive(column + i, x[i]);
      if (vector_store) {
        Vec<T>::from_float(x).store(grad + column);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) grad[column + i] = narrow<T>(x[i]);
      }
    }
    columns.singles([&](int64_t j) { grad[j] = narrow<T>(derive(j, widen(logits[j]))); });
  }
}

constexpr int kStatsThreads = 1024;

__device__ __forceinline__ int block_count(int v, int* scratch) {
  v = __reduce_add_sync(~0u, v);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  int total = 0;
  for (int w = 0; w < kStatsThreads / 32; ++w) total += scratch[w];
  return total;
}

__global__ void __launch_bounds__(kStatsThreads) label_stats_kernel(StatsArgs a) {
  __shared__ int counts[3][32];
  __shared__ float sums[2][32];
  int count = 0, below = 0, above = 0;
  float chosen = 0, all = 0;
#pragma unroll 8
  for (int64_t row = threadIdx.x; row < a.rows; row += kStatsThreads) {
    const int64_t y = a.target[row * a.target_stride];
    const bool valid = y != a.ignore_index;
    count += valid;
    below += valid && y < 0;
    above += valid && y >= a.vocab;
    if (a.class_weight && valid && y >= 0 && y < a.vocab) chosen += a.class_weight[y];
  }
  if (a.class_weight) {
#pragma unroll 8
    for (int64_t j = threadIdx.x; j < a.vocab; j += kStatsThreads) all += a.class_weight[j];
  }
  count = block_count(count, counts[0]);
  below = block_count(below, counts[1]);
  above = block_count(above, counts[2]);
  if (a.class_weight) {
    chosen = block_sum(chosen, sums[0]);
    all = block_sum(all, sums[1]);
  }
  if (threadIdx.x != 0) return;
  LabelStats s{};
  s.count = count, s.below = below, s.above = above;
  s.inverse_count = count ? 1.f / static_cast<float>(count) : 0.f;
  s.inverse_weight = a.class_weight && count ? 1.f / chosen : s.inverse_count;
  s.weight_sum = a.class_weight ? all : static_cast<float>(a.vocab);
  *a.stats = s;
}

__global__ void __launch_bounds__(kStatsThreads) totals_kernel(TotalsArgs a) {
  __shared__ float scratch[3][32];
  wait_for_previous_kernel();
  float loss = 0, z = 0, hit = 0;
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < a.rows; row += kStatsThreads) {
    loss += a.loss[row];
    if (a.z_total) z += a.z_loss[row];
    if (a.accuracy) hit += a.hit[row];
  }
  loss = block_sum(loss, scratch[0]);
  if (a.z_total) z = block_sum(z, scratch[1]);
  if (a.accuracy) hit = block_sum(hit, scratch[2]);
  if (threadIdx.x != 0) return;
  write(loss, a.total, a.dtype, 0);
  if (a.z_total) write(z, a.z_total, a.dtype, 0);
  if (a.accuracy) *a.accuracy = hit / static_cast<float>(max(a.stats->count, 1));
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads) scale_kernel(ScaleArgs a) {
  constexpr int kSize = Vec<T>::kSize;
  const bool in_place = a.grad == a.grad_out && a.grad_stride == a.out_stride;
  wait_for_previous_kernel();
  if (!a.per_row && in_place && read(a.factor, a.factor_dtype, 0) == 1.f) return;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* grad = static_cast<const T*>(a.grad) + row * a.grad_stride;
    T* out = static_cast<T*>(a.grad_out) + row * a.out_stride;
    const float factor = read(a.factor, a.factor_dtype, a.per_row ? row : 0);
    if (in_place && factor == 1.f) continue;
    const Columns<T> columns(grad, a.vocab);
    const bool vector_store = reinterpret_cast<uintptr_t>(grad) % 16 == reinterpret_cast<uintptr_t>(out) % 16;
    columns.singles([&](int64_t j) { out[j] = narrow<T>(widen(grad[j]) * factor); });
#pragma unroll 4
    for (int64_t v = threadIdx.x; v < columns.vectors; v += blockDim.x) {
      const int64_t column = columns.head + v * kSize;
      float x[kSize];
      Vec<T>::load_streaming(grad + column).to_float(x);
#pragma unroll
      for (int i = 0; i < kSize; ++i) x[i] *= factor;
      if (vector_store) {
        Vec<T>::from_float(x).store_streaming(out + column);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) out[column + i] = narrow<T>(x[i]);
      }
    }
  }
}

unsigned grid_for(int64_t rows) { return static_cast<unsigned>(rows < 0x7fffffff ? rows : 0x7fffffff); }

}  // namespace

void label_stats_cuda(const StatsArgs& a, const Host& host) {
  label_stats_kernel<<<1, kStatsThreads, 0, stream_of(host)>>>(a);
  check_launch("cross_entropy");
}

void totals_cuda(const TotalsArgs& a, const Host& host) {
  launch_early(totals_kernel, 1, kStatsThreads, host, a);
  check_launch("cross_entropy");
}

void forward_cuda_two_pass(const ForwardArgs& a, const Host& host) {
  const bool plain = a.softcap <= 0 && a.logit_scale == 1 && a.label_smoothing <= 0 && !a.hit && !a.prediction;
  visit(a.dtype, [&]<class T>(Type<T>) {
    const auto kernel = plain ? forward_two_pass<T, true> : forward_two_pass<T, false>;
    kernel<<<grid_for(a.rows), two_pass_threads(a.vocab, a.dtype), 0, stream_of(host)>>>(a);
  });
  check_launch("cross_entropy");
}

void scale_cuda(const ScaleArgs& a, const Host& host) {
  // Few enough blocks that the early exit is cheap, enough to keep the memory busy.
  const int64_t resident = int64_t{host.machine.multiprocessors} * 4;
  visit(a.dtype, [&]<class T>(Type<T>) {
    launch_early(scale_kernel<T>, grid_for(a.rows < resident ? a.rows : resident), two_pass_threads(a.vocab, a.dtype), host, a);
  });
  check_launch("cross_entropy");
}

}  // namespace liger::cross_entropy
