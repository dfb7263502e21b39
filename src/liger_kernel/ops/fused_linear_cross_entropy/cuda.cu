// The passes between the products on CUDA. None of them touches more than a chunk of hidden states or, for a bias alone, the
// logits scratch; all are bound by memory.
#include <algorithm>

#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/vec.cuh>
#include <liger_kernel/ops/fused_linear_cross_entropy/fused_linear_cross_entropy.h>

namespace liger::fused_linear_cross_entropy {
namespace {

constexpr const char* kOp = "fused_linear_cross_entropy";

constexpr int kCompactThreads = 1024;
constexpr int kCompactWarps = kCompactThreads / 32;
constexpr int kItems = 8;

// One block walks over the labels, 8192 at a time; thread t looks at rows t, t + 1024, ... of them, so that rows keep their order:
// place = rows kept before + kept in earlier (item, warp) pairs + kept in lower lanes.
__global__ void __launch_bounds__(kCompactThreads) compact_kernel(CompactArgs a) {
  __shared__ int before[kItems * kCompactWarps];
  __shared__ int total;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t kept = 0;
  for (int64_t first = 0; first < a.rows; first += kItems * kCompactThreads) {
    int64_t target[kItems];
    int rank[kItems];  // among the warp's, or -1
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t row = first + i * kCompactThreads + threadIdx.x;
      target[i] = row < a.rows ? a.target[row * a.target_stride] : a.ignore_index;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool keep = target[i] != a.ignore_index;
      const unsigned votes = __ballot_sync(~0u, keep);
      rank[i] = keep ? __popc(votes & ((1u << lane) - 1)) : -1;
      if (lane == 0) before[i * kCompactWarps + warp] = __popc(votes);
    }
    __syncthreads();
    if (warp == 0) {  // exclusive prefix sums of the 256 counts, 8 consecutive ones a lane
      constexpr int kEach = kItems * kCompactWarps / 32;
      int count[kEach], sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        count[i] = before[lane * kEach + i];
        sum += count[i];
      }
      int inclusive = sum;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, step);
        if (lane >= step) inclusive += other;
      }
      int running = inclusive - sum;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        before[lane * kEach + i] = running;
        running += count[i];
      }
      if (lane == 31) total = running;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t row = first + i * kCompactThreads + threadIdx.x;
      if (row >= a.rows) continue;
      const int64_t place = kept + before[i * kCompactWarps + warp] + rank[i];
      const bool keep = rank[i] >= 0 && place < a.valid;
      a.slot[row] = keep ? place : -1;
      if (!keep) continue;
      a.row_of[place] = row;
      a.target_out[place] = target[i];
      if (a.row_scale) a.row_scale_out[place] = a.row_scale[row];
    }
    kept += total;
    __syncthreads();  // `before` and `total` are read; the next round writes them
  }
  for (int64_t place = kept + threadIdx.x; place < a.valid; place += kCompactThreads) {  // a count that was too large
    a.row_of[place] = 0;
    a.target_out[place] = a.ignore_index;
    if (a.row_scale) a.row_scale_out[place] = 0;
  }
}

// kWhole elements of D from elements of S; a null source is zero.
template <class S, class D>
__device__ __forceinline__ Vec<D> convert(const S* src) {
  if (!src) return {make_uint4(0, 0, 0, 0)};
  if constexpr (std::is_same_v<S, D>) {
    return Vec<D>::load(src);
  } else {
    constexpr int kSize = Vec<D>::kSize, kPart = Vec<S>::kSize;
    float v[kSize];
#pragma unroll
    for (int part = 0; part < kSize; part += kPart) {
      float w[kPart];
      Vec<S>::load_streaming(src + part).to_float(w);
#pragma unroll
      for (int i = 0; i < kPart; ++i) v[part + i] = w[i];
    }
    return Vec<D>::from_float(v);
  }
}

// blockIdx.x: row; blockIdx.y and threads: its vectors (kVector) or elements.
template <class S, class D, bool kVector>
__global__ void move_kernel(MoveArgs a) {
  const int64_t row = blockIdx.x;
  const S* src = static_cast<const S*>(a.src);
  if (src) src += (a.src_row ? a.src_row[row] : row) * a.src_stride;
  D* dst = static_cast<D*>(a.dst) + (a.dst_row ? a.dst_row[row] : row) * a.dst_stride;
  constexpr int kSize = kVector ? Vec<D>::kSize : 1;
  const int64_t count = a.cols / kSize, step = int64_t{gridDim.y} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x; i < count; i += step) {
    if constexpr (kVector) {
      convert<S, D>(src ? src + i * kSize : nullptr).store(dst + i * kSize);
    } else if constexpr (std::is_same_v<S, D>) {
      dst[i] = src ? src[i] : D{};
    } else {
      dst[i] = narrow<D>(src ? widen(src[i]) : 0.f);
    }
  }
}

template <bool kVector>
void launch_move(const MoveArgs& a, const Host& host) {
  LIGER_CHECK(a.rows < int64_t{1} << 31, kOp, ": ", a.rows, " rows, at most 2^31 - 1 are supported");
  visit(a.dst_dtype, [&]<class D>(Type<D>) {
    const int64_t count = a.cols / (kVector ? Vec<D>::kSize : 1);
    const int threads = count >= 256 ? 256 : count > 64 ? 128 : 32;
    const int64_t tiles = std::clamp<int64_t>((count + threads - 1) / threads, 1, 65535);
    const dim3 grid(static_cast<unsigned>(a.rows), static_cast<unsigned>(tiles));
    if (a.src_dtype == a.dst_dtype) {
      move_kernel<D, D, kVector><<<grid, threads, 0, stream_of(host)>>>(a);
    } else {
      move_kernel<float, D, kVector><<<grid, threads, 0, stream_of(host)>>>(a);
    }
  });
  check_launch(kOp);
}

// A block sums a strip of 32 vectors' columns: lane = vector, warp = every eighth row. The eight partial sums of a column are added
// in warp order. One pass over the chunk's gradient.
constexpr int kSumWarps = 8;

template <class T>
__global__ void __launch_bounds__(32 * kSumWarps) column_sums_kernel(SumArgs a, bool aligned) {
  constexpr int kSize = Vec<T>::kSize, kStrip = 32 * kSize;
  __shared__ float part[kSumWarps][kStrip];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t strip = int64_t{blockIdx.x} * kStrip, column = strip + lane * kSize;
  float sum[kSize] = {};
  if (column + kSize <= a.cols && aligned) {
#pragma unroll 4
    for (int64_t row = warp; row < a.rows; row += kSumWarps) {
      float v[kSize];
      Vec<T>::load(static_cast<const T*>(a.a) + row * a.stride + column).to_float(v);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] += v[i];
    }
  } else {
    for (int64_t row = warp; row < a.rows; row += kSumWarps) {
      const T* p = static_cast<const T*>(a.a) + row * a.stride + column;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (column + i < a.cols) sum[i] += widen(p[i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) part[warp][lane * kSize + i] = sum[i];
  __syncthreads();
  const int mine = threadIdx.x;
  if (mine >= kStrip || strip + mine >= a.cols) return;
  float total = 0;
#pragma unroll
  for (int w = 0; w < kSumWarps; ++w) total += part[w][mine];
  float* out = a.out + strip + mine;
  *out = a.accumulate ? *out + total : total;
}

__global__ void spread_results_kernel(SpreadArgs a) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= a.rows) return;
  const int64_t slot = a.slot[row];
  a.loss_out[row] = slot < 0 ? 0.f : a.loss[slot];
  if (a.z_loss_out) a.z_loss_out[row] = slot < 0 ? 0.f : a.z_loss[slot];
  if (a.hit_out) a.hit_out[row] = slot < 0 ? 0.f : a.hit[slot];
  if (a.prediction_out) a.prediction_out[row] = slot < 0 ? -1 : a.prediction[slot];
}

// One block a row; U is as wide as the rows' alignment allows, `count` of them make a row.
template <class U>
__global__ void clear_ignored_kernel(const int64_t* slot, U* dx, int64_t count) {
  const int64_t row = blockIdx.x;
  if (slot[row] >= 0) return;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) dx[row * count + i] = U{};
}

}  // namespace

void compact_cuda(const CompactArgs& a, const Host& host) {
  compact_kernel<<<1, kCompactThreads, 0, stream_of(host)>>>(a);
  check_launch(kOp);
}

void move_rows_cuda_vectors(const MoveArgs& a, const Host& host) { launch_move<true>(a, host); }
void move_rows_cuda_elements(const MoveArgs& a, const Host& host) { launch_move<false>(a, host); }

void column_sums_cuda(const SumArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const int64_t strips = (a.cols + 32 * Vec<T>::kSize - 1) / (32 * Vec<T>::kSize);
    const bool aligned = reinterpret_cast<uintptr_t>(a.a) % 16 == 0 && a.stride % Vec<T>::kSize == 0;
    column_sums_kernel<T><<<static_cast<unsigned>(strips), 32 * kSumWarps, 0, stream_of(host)>>>(a, aligned);
  });
  check_launch(kOp);
}

void spread_cuda(const SpreadArgs& a, const Host& host) {
  LIGER_CHECK(a.rows < int64_t{1} << 31, kOp, ": ", a.rows, " rows, at most 2^31 - 1 are supported");
  spread_results_kernel<<<static_cast<unsigned>((a.rows + 255) / 256), 256, 0, stream_of(host)>>>(a);
  check_launch(kOp);
  if (!a.dx || a.hidden == 0) return;
  const int64_t bytes = a.hidden * size_of(a.dtype);
  const unsigned rows = static_cast<unsigned>(a.rows);
  if (bytes % 16 == 0 && reinterpret_cast<uintptr_t>(a.dx) % 16 == 0) {
    clear_ignored_kernel<<<rows, 128, 0, stream_of(host)>>>(a.slot, static_cast<uint4*>(a.dx), bytes / 16);
  } else {
    clear_ignored_kernel<<<rows, 128, 0, stream_of(host)>>>(a.slot, static_cast<uint16_t*>(a.dx), bytes / 2);
  }
  check_launch(kOp);
}

}  // namespace liger::fused_linear_cross_entropy
