// RMSNorm on CUDA.
//
// cuda_registers: one row per block (backward: per turn of a persistent block), held in registers as raw 16-byte vectors, so x
//   (and dy) are read once and the result written once. Backward keeps its share of dw in fp32 registers over all its rows.
// cuda_wide: any width, type and alignment; reads the row again from L2 for the write.
// dw: each block writes one fp32 partial row, and a second kernel sums the partial rows in a fixed order (deterministic).
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/vec.cuh>
#include <liger_kernel/ops/rms_norm/plan.h>

namespace liger::rms_norm {
namespace {

// rstd from the mean square. In "each step" mode the mean, eps and rstd are values of x's type.
template <class T>
__device__ __forceinline__ float rstd_of(float mean, float eps, Rounding rounding) {
  if (rounding == Rounding::kEachStep) return round_to<T>(rsqrtf(round_to<T>(mean) + round_to<T>(eps)));
  return rsqrtf(mean + eps);
}

template <class T>
__device__ __forceinline__ float normalise(float x, float rstd, float w, Rounding rounding) {
  const float hat = x * rstd;
  if (rounding == Rounding::kLast) return hat * w;
  return round_to<T>(hat) * (rounding == Rounding::kEachStep ? round_to<T>(w) : w);
}

// kSize weights from column on, with the offset; 1 without a weight.
template <class W, int kSize>
__device__ __forceinline__ void load_weight(const W* weight, int64_t column, float offset, float (&w)[kSize]) {
  constexpr int kPerVector = Vec<W>::kSize;
#pragma unroll
  for (int i = 0; i < kSize; i += kPerVector) {
    float part[kPerVector];
    if (weight) Vec<W>::load(weight + column + i).to_float(part);
#pragma unroll
    for (int k = 0; k < kPerVector; ++k) w[i + k] = weight ? part[k] + offset : 1.f;
  }
}

template <class T, class W, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) forward_registers(ForwardArgs a) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ float scratch[2][32];
  const auto* weight = static_cast<const W*>(a.weight);
  const float offset = a.rounding == Rounding::kEachStep ? round_to<T>(a.weight_offset) : a.weight_offset;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    // 1. Load the row and sum the squares.
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    Vec<T> held[kVectors];
    float squares = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = (threadIdx.x + int64_t{v} * blockDim.x) * kSize;
      held[v] = column < a.cols ? Vec<T>::load_streaming(x + column) : Vec<T>{};
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[kSize];
      held[v].to_float(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) squares += values[i] * values[i];
    }

    // 2. Finish the reduction.
    const float rstd = rstd_of<T>(block_sum(squares, scratch[turn]) / static_cast<float>(a.cols), a.eps, a.rounding);
    if (threadIdx.x == 0) a.rstd[row] = rstd;

      // 3. Scale and write.
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = (threadIdx.x + int64_t{v} * blockDim.x) * kSize;
      if (column >= a.cols) break;
      float values[kSize], w[kSize];
      held[v].to_float(values);
      load_weight(weight, column, offset, w);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = normalise<T>(values[i], rstd, w[i], a.rounding);
      Vec<T>::from_float(values).store_streaming(y + column);
    }
  }
}

template <class T, class W, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) backward_registers(BackwardArgs a, float* partial_dw) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ float scratch[2][32];
  const auto* weight = static_cast<const W*>(a.weight);
  const bool round_hat = a.rounding != Rounding::kLast;
  float dw[kVectors * kSize] = {};
  Vec<T> x[kVectors], dy[kVectors];

  const auto load_row = [&](int64_t row) {
    const T* px = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* pdy = static_cast<const T*>(a.dy) + row * a.dy_stride;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = (threadIdx.x + int64_t{v} * blockDim.x) * kSize;
      x[v] = column < a.cols ? Vec<T>::load_streaming(px + column) : Vec<T>{};
      dy[v] = column < a.cols ? Vec<T>::load_streaming(pdy + column) : Vec<T>{};
    }
  };

  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    // 1. Load x and dy; sum g x.
    load_row(row);
    const float rstd = a.rstd[row];
    float product = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = (threadIdx.x + int64_t{v} * blockDim.x) * kSize;
      if (column >= a.cols) break;
      float xs[kSize], gs[kSize], w[kSize];
      x[v].to_float(xs);
      dy[v].to_float(gs);
      load_weight(weight, column, a.weight_offset, w);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        product += gs[i] * w[i] * xs[i];
        const float hat = xs[i] * rstd;
        dw[v * kSize + i] += gs[i] * (round_hat ? round_to<T>(hat) : hat);
      }
    }

    // 2. Finish the reduction.
    const float c = block_sum(product, scratch[turn]) / static_cast<float>(a.cols) * rstd * rstd;

    // 3. Write dx.
    if (a.dx == nullptr) continue;
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = (threadIdx.x + int64_t{v} * blockDim.x) * kSize;
      if (column >= a.cols) break;
      float xs[kSize], gs[kSize], w[kSize];
      x[v].to_float(xs);
      dy[v].to_float(gs);
      load_weight(weight, column, a.weight_offset, w);
#pragma unroll
      for (int i = 0; i < kSize; ++i) xs[i] = (gs[i] * w[i] - xs[i] * c) * rstd;
      Vec<T>::from_float(xs).store_streaming(dx + column);
    }
  }

  // 4. This block's share of dw.
  if (partial_dw == nullptr) return;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t column = (threadIdx.x + int64_t{v} * blockDim.x) * kSize;
    if (column >= a.cols) break;
#pragma unroll
    for (int i = 0; i < kSize; ++i) partial_dw[blockIdx.x * a.cols + column + i] = dw[v * kSize + i];
  }
}

// dw[column] = sum of the partial rows: 32 columns a block, 32 rows of threads, then a tree over the threads.
__global__ void __launch_bounds__(1024) sum_partials(const float* partial, float* dw, int64_t parts, int64_t cols) {
  __shared__ float sums[32][33];
  const int64_t column = blockIdx.x * int64_t{32} + threadIdx.x;
  float total = 0;
  if (column < cols) {
    for (int64_t part = threadIdx.y; part < parts; part += 32) total += partial[part * cols + column];
  }
  sums[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  total = warp_sum(sums[threadIdx.x][threadIdx.y]);
  const int64_t out = blockIdx.x * int64_t{32} + threadIdx.y;
  if (threadIdx.x == 0 && out < cols) dw[out] = total;
}

__device__ __forceinline__ float read(const void* p, DType dtype, int64_t i) {
  return dtype == DType::kF32    ? static_cast<const float*>(p)[i]
         : dtype == DType::kBF16 ? widen(static_cast<const BFloat16*>(p)[i])
                                 : widen(static_cast<const Float16*>(p)[i]);
}

template <class T>
__global__ void __launch_bounds__(512) forward_wide_kernel(ForwardArgs a) {
  __shared__ float scratch[2][32];
  const float offset = a.rounding == Rounding::kEachStep ? round_to<T>(a.weight_offset) : a.weight_offset;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    float squares = 0;
    for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) squares += widen(x[j]) * widen(x[j]);
    const float rstd = rstd_of<T>(block_sum(squares, scratch[turn]) / static_cast<float>(a.cols), a.eps, a.rounding);
    if (threadIdx.x == 0) a.rstd[row] = rstd;
    for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) {
      const float w = a.weight ? read(a.weight, a.weight_dtype, j) + offset : 1.f;
      y[j] = narrow<T>(normalise<T>(widen(x[j]), rstd, w, a.rounding));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(512) backward_wide_kernel(BackwardArgs a) {
  __shared__ float scratch[2][32];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
    const float rstd = a.rstd[row];
    const auto g = [&](int64_t j) { return widen(dy[j]) * (a.weight ? read(a.weight, a.weight_dtype, j) + a.weight_offset : 1.f); };
    float product = 0;
    for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) product += g(j) * widen(x[j]);
    const float c = block_sum(product, scratch[turn]) / static_cast<float>(a.cols) * rstd * rstd;
    for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) dx[j] = narrow<T>((g(j) - widen(x[j]) * c) * rstd);
  }
}

// One thread a column, blockIdx.y a range of rows; consecutive threads read consecutive columns.
template <class T>
__global__ void __launch_bounds__(256) dw_wide_kernel(BackwardArgs a, float* partial_dw, int64_t rows_per_part) {
  const int64_t column = blockIdx.x * int64_t{256} + threadIdx.x;
  if (column >= a.cols) return;
  const int64_t first = blockIdx.y * rows_per_part;
  const int64_t last = first + rows_per_part < a.rows ? first + rows_per_part : a.rows;
  const bool round_hat = a.rounding != Rounding::kLast;
  float total = 0;
  for (int64_t row = first; row < last; ++row) {
    const float hat = widen(static_cast<const T*>(a.x)[row * a.x_stride + column]) * a.rstd[row];
    total += widen(static_cast<const T*>(a.dy)[row * a.dy_stride + column]) * (round_hat ? round_to<T>(hat) : hat);
  }
  partial_dw[blockIdx.y * a.cols + column] = total;
}

unsigned grid_for(int64_t rows) { return static_cast<unsigned>(rows < 0x7fffffff ? rows : 0x7fffffff); }

void sum_rows(const float* partial, float* dw, int64_t parts, int64_t cols, const Host& host) {
  sum_partials<<<static_cast<unsigned>((cols + 31) / 32), dim3(32, 32), 0, stream_of(host)>>>(partial, dw, parts, cols);
  check_launch("rms_norm");
}

// f(Type<T>, Type<W>): the weight has x's type or fp32.
template <class F>
void visit_types(DType dtype, DType weight_dtype, F&& f) {
  visit(dtype, [&]<class T>(Type<T>) {
    if (weight_dtype == dtype) {
      f(Type<T>{}, Type<T>{});
    } else {
      f(Type<T>{}, Type<float>{});
    }
  });
}

}  // namespace

void forward_cuda_registers(const ForwardArgs& a, const Host& host) {
  const Plan plan = choose(a);
  visit_types(a.dtype, a.weight_dtype, [&]<class T, class W>(Type<T>, Type<W>) {
    const auto kernel = plan.vectors == 1   ? forward_registers<T, W, 1>
                        : plan.vectors == 2 ? forward_registers<T, W, 2>
                                            : forward_registers<T, W, 4>;
    kernel<<<grid_for(a.rows), plan.threads, 0, stream_of(host)>>>(a);
  });
  check_launch("rms_norm");
}

void backward_cuda_registers(const BackwardArgs& a, const Host& host) {
  const Plan plan = choose(a, host.machine);
  const Scratch partial = a.dw ? host.scratch(plan.blocks * a.cols * sizeof(float)) : Scratch{};
  visit_types(a.dtype, a.weight_dtype, [&]<class T, class W>(Type<T>, Type<W>) {
    const auto kernel = plan.vectors == 1   ? backward_registers<T, W, 1>
                        : plan.vectors == 2 ? backward_registers<T, W, 2>
                                            : backward_registers<T, W, 4>;
    kernel<<<plan.blocks, plan.threads, 0, stream_of(host)>>>(a, partial.as<float>());
  });
  check_launch("rms_norm");
  if (a.dw) sum_rows(partial.as<float>(), a.dw, plan.blocks, a.cols, host);
}

void forward_cuda_wide(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) { forward_wide_kernel<T><<<grid_for(a.rows), 512, 0, stream_of(host)>>>(a); });
  check_launch("rms_norm");
}

void backward_cuda_wide(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    if (a.dx && a.rows > 0) backward_wide_kernel<T><<<grid_for(a.rows), 512, 0, stream_of(host)>>>(a);
    if (!a.dw) return;
    const int64_t parts = a.rows < 64 ? 1 : a.rows / 64 < 256 ? a.rows / 64 : 256;
    const Scratch partial = host.scratch(parts * a.cols * sizeof(float));
    const dim3 grid(static_cast<unsigned>((a.cols + 255) / 256), static_cast<unsigned>(parts));
    dw_wide_kernel<T><<<grid, 256, 0, stream_of(host)>>>(a, partial.as<float>(), (a.rows + parts - 1) / parts);
    sum_rows(partial.as<float>(), a.dw, parts, a.cols, host);
  });
  check_launch("rms_norm");
}

}  // namespace liger::rms_norm
