// Statistics and gradient of tiles of logits on CUDA for any width, type, alignment and option; one block a row.
//
// statistics: reads the row once, every thread with a largest element and sums of its own; one barrier, then every thread merges
//   the warps' shares in the same order and the first writes. Rows' states are carried from tile to tile by that thread alone.
// gradient: each element is read and written by one thread, so no barrier at all.
// A row's aligned middle goes in 16-byte vectors, the elements before and after it one by one.
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/vec.cuh>
#include <liger_kernel/ops/fused_linear_log_probs/fused_linear_log_probs.h>

namespace liger::fused_linear_log_probs {
namespace {

#include <liger_kernel/ops/fused_linear_log_probs/row.inl.h>

constexpr const char* kOp = "fused_linear_log_probs";
constexpr int kMaxThreads = 512, kMaxWarps = kMaxThreads / 32;

// Two to four 16-byte vectors a thread before a block grows.
int threads_for(int64_t cols, DType dtype) {
  const int64_t vectors = cols * size_of(dtype) / 16;
  int threads = 32;
  while (threads < kMaxThreads && threads * 4 <= vectors) threads *= 2;
  return threads;
}

unsigned grid_for(int64_t rows) { return static_cast<unsigned>(rows < 0x7fffffff ? rows : 0x7fffffff); }

// e^x, relative error 2^-22 + |x| 2^-24.
__device__ __forceinline__ float exp_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}

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

// kCount values of z into a thread's sums. Elements equal to the largest are counted, not exponentiated; a new largest leaves one out.
template <int kCount>
__device__ __forceinline__ void add(Sums<float>& s, const float (&z)[kCount]) {
  float m = s.largest;
#pragma unroll
  for (int i = 0; i < kCount; ++i) m = fmaxf(m, z[i]);  // passes over NaN, which the exponentials bring in
  const bool higher = m > s.largest;
  if (higher) {
    const float shift = s.largest - m, w = exp_fast(shift), count = s.others + 1;
    s.weighted = w * (s.weighted + (w > 0 ? shift : 0.f) * count);
    s.others = w * count;
    s.largest = m;
  }
  const float base = m == -INFINITY ? 0.f : m;
  int same = higher ? -1 : 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float d = z[i] - base, e = z[i] == m ? 0.f : exp_fast(d);
    same += z[i] == m;
    s.others += e;
    s.weighted += e * fmaxf(d, kLowest);
  }
  s.others += static_cast<float>(same);
}

struct Share {
  Sums<float> sums;
  unsigned long long best = 0;
};

__device__ __forceinline__ void merge(Share& a, const Share& b) {
  merge(a.sums, b.sums);
  a.best = a.best > b.best ? a.best : b.best;
}

// The first warp's threads get the block's share. A barrier before and after the scratch is used.
__device__ __forceinline__ Share block_merge(Share share, Share* scratch) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    Share other;
    other.sums.largest = __shfl_xor_sync(~0u, share.sums.largest, lanes);
    other.sums.others = __shfl_xor_sync(~0u, share.sums.others, lanes);
    other.sums.weighted = __shfl_xor_sync(~0u, share.sums.weighted, lanes);
    other.best = __shfl_xor_sync(~0u, share.best, lanes);
    merge(share, other);
  }
  const int warps = blockDim.x / 32;
  if (warps == 1) return share;
  __syncthreads();  // the previous row's shares have been read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = share;
  __syncthreads();
  if (threadIdx.x >= 32) return share;
  share = scratch[0];
  for (int w = 1; w < warps; ++w) merge(share, scratch[w]);
  return share;
}

// kTrack: the index of the largest is wanted.
template <class T, bool kPlain, bool kTrack>
__global__ void __launch_bounds__(kMaxThreads) statistics_kernel(StatisticsArgs a) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ Share scratch[kMaxWarps];
  const ToZ<kPlain> to_z(a.transform);
  const bool last = a.first + a.cols == a.vocab;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
    const int64_t y = a.target[row * a.target_stride], column = y - a.first;
    const bool ignored = y == a.ignore_index;
    if (ignored || !valid_target(y, a.vocab)) {  // of the row, so the whole block turns here
      if (last && threadIdx.x == 0) write_constants(a.results, row, ignored ? 0.f : NAN);
      continue;
    }
    const Columns<T> columns(logits, a.cols);
    Share share;
    const auto take = [&]<int kCount>(int64_t j, float(&z)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        z[i] = to_z(z[i]);
        if constexpr (kTrack) {
          const auto key = best_key(z[i], static_cast<uint32_t>(a.first + j + i));
          share.best = key > share.best ? key : share.best;
        }
      }
      add(share.sums, z);
    };
    columns.singles([&](int64_t j) {
      float z[1] = {widen(logits[j])};
      take(j, z);
    });
    const T* body = logits + columns.head;
#pragma unroll 4
    for (int64_t v = threadIdx.x; v < columns.vectors; v += blockDim.x) {
      float z[kSize];
      Vec<T>::load(body + v * kSize).to_float(z);
      take(columns.head + v * kSize, z);
    }
    share = block_merge(share, scratch);
    if (threadIdx.x != 0) continue;

    RowState state{-INFINITY, 0.f, -1., 0., 0};
    if (a.first > 0) state = a.state[row];
    Sums<double> sums;
    sums.largest = state.largest, sums.others = state.others, sums.weighted = state.weighted;
    merge(sums, share.sums);
    state.largest = sums.largest, state.others = sums.others, state.weighted = sums.weighted;
    state.best = share.best > state.best ? share.best : state.best;
    if (column >= 0 && column < a.cols) state.target = to_z(widen(logits[column]));
    if (last) {
      write_results(a.results, row, state);
    } else {
      a.state[row] = state;
    }
  }
}

template <class T, bool kPlain>
__global__ void __launch_bounds__(kMaxThreads) gradient_kernel(GradientArgs a) {
  constexpr int kSize = Vec<T>::kSize;
  const ToZ<kPlain> to_z(a.transform);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
    T* grad = static_cast<T*>(a.grad) + row * a.grad_stride;
    const int64_t y = a.target[row * a.target_stride], column = y - a.first;
    const bool ignored = y == a.ignore_index;
    if (ignored || !valid_target(y, a.vocab)) {
      float values[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = ignored ? 0.f : NAN;
      const Columns<T> out(grad, a.cols);
      out.singles([&](int64_t j) { grad[j] = narrow<T>(values[0]); });
      for (int64_t v = threadIdx.x; v < out.vectors; v += blockDim.x) Vec<T>::from_float(values).store(grad + out.head + v * kSize);
      continue;
    }
    // Each element is written by the thread that reads it, so grad may be the logits. Vectors are stored where both rows are aligned alike.
    const Columns<T> columns(logits, a.cols);
    const bool vector_store = reinterpret_cast<uintptr_t>(grad) % 16 == reinterpret_cast<uintptr_t>(logits) % 16;
    const RowFactors r(a, row);
    const auto derive = [&](int64_t j, float logit) {
      const float z = to_z(logit), d = fmaxf(z - r.largest, kLowest);
      const float others = (z != z ? z : z - r.largest < kLowest ? 0.f : exp_fast(d)) * fmaf(r.b, d, r.a);
      const float dz = j == column ? r.own : others;
      return kPlain ? dz : dz * to_z.slope(z);
    };
    columns.singles([&](int64_t j) { grad[j] = narrow<T>(derive(j, widen(logits[j]))); });
#pragma unroll 2
    for (int64_t v = threadIdx.x; v < columns.vectors; v += blockDim.x) {
      const int64_t first = columns.head + v * kSize;
      float z[kSize];
      Vec<T>::load(logits + first).to_float(z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) z[i] = derive(first + i, z[i]);
      if (vector_store) {
        Vec<T>::from_float(z).store(grad + first);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) grad[first + i] = narrow<T>(z[i]);
      }
    }
  }
}

template <class T>
auto statistics_kernel_for(const StatisticsArgs& a, bool is_plain) {
  if (a.results.prediction) return is_plain ? statistics_kernel<T, true, true> : statistics_kernel<T, false, true>;
  return is_plain ? statistics_kernel<T, true, false> : statistics_kernel<T, false, false>;
}

}  // namespace

void statistics_cuda(const StatisticsArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const auto kernel = statistics_kernel_for<T>(a, plain(a.transform));
    kernel<<<grid_for(a.rows), threads_for(a.cols, a.dtype), 0, stream_of(host)>>>(a);
  });
  check_launch(kOp);
}

void gradient_cuda(const GradientArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const auto kernel = plain(a.transform) ? gradient_kernel<T, true> : gradient_kernel<T, false>;
    kernel<<<grid_for(a.rows), threads_for(a.cols, a.dtype), 0, stream_of(host)>>>(a);
  });
  check_launch(kOp);
}

}  // namespace liger::fused_linear_log_probs
