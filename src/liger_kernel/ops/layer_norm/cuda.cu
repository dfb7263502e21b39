// LayerNorm on CUDA.
//
// cuda_registers (forward): one row a block, held in registers as raw 16-byte vectors; x is read once, y written once. One barrier.
// cuda_staged (backward): persistent blocks. Rows of x and dy come ahead of their use into shared memory by asynchronous copies;
//   each thread copies what it alone reads, so that waiting for them takes no barrier. Both sums of a row go through one
//   barrier. The shares of dw and db stay in registers over all rows of a block.
// cuda_wide: any width, type and alignment; reads a row again from L2.
// dw and db: each block writes one fp32 partial row of both, and one kernel adds the partial rows in a fixed order.
#include <liger_kernel/core/cuda/async_copy.cuh>
#include <liger_kernel/core/cuda/element.cuh>
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/overlap.cuh>
#include <liger_kernel/core/cuda/vec.cuh>
#include <liger_kernel/ops/layer_norm/plan.h>
#include <liger_kernel/ops/layer_norm/statistics.cuh>

namespace liger::layer_norm {
namespace {

// kSize values from column on, plus offset; `missing` without values.
template <class W, int kSize>
__device__ __forceinline__ void load_columns(const W* values, int column, float offset, float missing, float (&out)[kSize]) {
  constexpr int kPerVector = Vec<W>::kSize;
#pragma unroll
  for (int i = 0; i < kSize; i += kPerVector) {
    float part[kPerVector];
    if (values) Vec<W>::load(values + column + i).to_float(part);
#pragma unroll
    for (int k = 0; k < kPerVector; ++k) out[i + k] = values ? part[k] + offset : missing;
  }
}

template <class T, class W, int kVectors>
__global__ void __launch_bounds__(kMaxForwardThreads) forward_registers(ForwardArgs a) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ __align__(16) float2 scratch[2][32];
  const auto* weight = static_cast<const W*>(a.weight);
  const auto* bias = static_cast<const W*>(a.bias);
  const int cols = static_cast<int>(a.cols);
  const auto column_of = [](int v) { return static_cast<int>(threadIdx.x + v * blockDim.x) * kSize; };
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    // 1. Load the row, and for the pivot its first columns.
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    Vec<T> held[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) held[v] = column_of(v) < cols ? Vec<T>::load(x + column_of(v)) : Vec<T>{};
    float first[kSize], pivot = 0;
    Vec<T>::load(x).to_float(first);
#pragma unroll
    for (int i = 0; i < kSize; ++i) pivot += first[i] * (1.f / kSize);

    // 2. Mean and rstd.
    const Statistics s = statistics(pivot, a.cols, a.eps, [&](float pivot) {
      float2 about{};
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (column_of(v) >= cols) break;
        float values[kSize], sum = 0, squares = 0;  // short chains of additions
        held[v].to_float(values);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const float d = values[i] - pivot;
          sum += d;
          squares += d * d;
        }
        about.x += sum;
        about.y += squares;
      }
      return block_sum2(about, scratch[turn ^= 1]);
    });
    if (threadIdx.x == 0) {
      a.mean[row] = s.mean;
      a.rstd[row] = s.rstd;
    }

    // 3. Scale, shift and write.
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = column_of(v);
      if (column >= cols) break;
      float values[kSize], w[kSize], b[kSize];
      held[v].to_float(values);
      load_columns(weight, column, a.weight_offset, 1.f, w);
      load_columns(bias, column, 0.f, 0.f, b);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = (values[i] - s.mean - s.rest) * s.rstd * w[i] + b[i];
      Vec<T>::from_float(values).store_streaming(y + column);
    }
  }
}

// kMost: threads of a block at most; 1024 of them have no registers for the weights.
template <class T, class W, int kElements, int kMost>
__global__ void __launch_bounds__(kMost) backward_staged(BackwardArgs a, float* partial, int stages) {
  constexpr int kSize = Vec<T>::kSize, kVectors = kElements / kSize;
  constexpr bool kHold = kMost <= 512;
  __shared__ __align__(16) float2 scratch[2][32];
  extern __shared__ uint4 staged[];  // [stages, x and dy, kVectors, threads]
  const auto* weight = static_cast<const W*>(a.weight);
  const int cols = static_cast<int>(a.cols);
  const auto column_of = [](int v) { return static_cast<int>(threadIdx.x + v * blockDim.x) * kSize; };
  const auto place = [&](int stage, int which, int v) { return staged + ((stage * 2 + which) * kVectors + v) * blockDim.x + threadIdx.x; };

  // Starts the copies of one row; a row behind the last is an empty group.
  const auto fetch = [&](int64_t row, int stage) {
    if (row < a.rows) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int column = column_of(v);
        if (column >= cols) break;
        copy_async(place(stage, 0, v), x + column);
        copy_async(place(stage, 1, v), dy + column);
      }
    }
    commit_copies();
  };

  float dw[kElements] = {}, db[kElements] = {}, held[kHold ? kVectors : 1][kSize];
  const auto weights = [&](int v, float(&w)[kSize]) {
    if constexpr (kHold) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) w[i] = held[v][i];
    } else {
      load_columns(weight, column_of(v), a.weight_offset, 1.f, w);
    }
  };
  if constexpr (kHold) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) < cols) load_columns(weight, column_of(v), a.weight_offset, 1.f, held[v]);
    }
  }
  int64_t ahead = blockIdx.x;
  int fetched = 0;
  for (; fetched < stages - 1; ++fetched, ahead += gridDim.x) fetch(ahead, fetched);
  float next_mean = 0, next_rstd = 0;
  if (blockIdx.x < a.rows) next_mean = a.mean[blockIdx.x], next_rstd = a.rstd[blockIdx.x];

  int stage = 0, turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    // 1. Start a later row, in the place that the last one has left; wait for this one.
    fetch(ahead, fetched);
    ahead += gridDim.x;
    fetched = fetched + 1 == stages ? 0 : fetched + 1;
    const float mean = next_mean, rstd = next_rstd;
    if (row + gridDim.x < a.rows) next_mean = a.mean[row + gridDim.x], next_rstd = a.rstd[row + gridDim.x];
    wait_copies(stages - 1);

    // 2. The sums of g and of g (x - mean); this row's part of dw and db.
    float2 sums{};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = column_of(v);
      if (column >= cols) break;
      float d[kSize], g[kSize], w[kSize];
      Vec<T>{*place(stage, 0, v)}.to_float(d);
      Vec<T>{*place(stage, 1, v)}.to_float(g);
      weights(v, w);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        d[i] -= mean;
        dw[v * kSize + i] += g[i] * (d[i] * rstd);
        db[v * kSize + i] += g[i];
        g[i] *= w[i];
        sums.x += g[i];
        sums.y += g[i] * d[i];
      }
    }

    // 3. dx = rstd (g - mean(g) - (x - mean) c), c = rstd^2 mean(g (x - mean)).
    if (a.dx != nullptr) {
      sums = block_sum2(sums, scratch[turn]);
      const float mean_g = sums.x / static_cast<float>(a.cols), c = sums.y / static_cast<float>(a.cols) * rstd * rstd;
      T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int column = column_of(v);
        if (column >= cols) break;
        float d[kSize], g[kSize], w[kSize];
        Vec<T>{*place(stage, 0, v)}.to_float(d);
        Vec<T>{*place(stage, 1, v)}.to_float(g);
        weights(v, w);
#pragma unroll
        for (int i = 0; i < kSize; ++i) d[i] = (g[i] * w[i] - mean_g - (d[i] - mean) * c) * rstd;
        Vec<T>::from_float(d).store_streaming(dx + column);
      }
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
  }

  // 4. This block's shares.
  if (partial == nullptr) return;
  float* out = partial + int64_t{blockIdx.x} * 2 * a.cols;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = column_of(v);
    if (column >= cols) break;
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const int e = v * kSize + i;
      *reinterpret_cast<float4*>(out + column + i) = {dw[e], dw[e + 1], dw[e + 2], dw[e + 3]};
      *reinterpret_cast<float4*>(out + a.cols + column + i) = {db[e], db[e + 1], db[e + 2], db[e + 3]};
    }
  }
}

// dw and db from the partial rows [parts, 2 cols]: 32 columns a block, 32 rows of threads, then a tree over the threads.
__global__ void __launch_bounds__(1024) add_partials(BackwardArgs a, const float* partial, int64_t parts) {
  __shared__ float sums[32][33];
  wait_for_previous_kernel();
  const int64_t both = 2 * a.cols, column = blockIdx.x * int64_t{32} + threadIdx.x;
  float total = 0;
  if (column < both) {
#pragma unroll 4
    for (int64_t part = threadIdx.y; part < parts; part += 32) total += partial[part * both + column];
  }
  sums[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  total = warp_sum(sums[threadIdx.x][threadIdx.y]);
  const int64_t out = blockIdx.x * int64_t{32} + threadIdx.y;
  if (threadIdx.x != 0 || out >= both) return;
  if (out < a.cols) {
    if (a.dw) write(total, a.dw, a.weight_dtype, out);
  } else {
    if (a.db) write(total, a.db, a.bias_dtype, out - a.cols);
  }
}

template <class T>
__global__ void __launch_bounds__(512) forward_wide_kernel(ForwardArgs a) {
  __shared__ __align__(16) float2 scratch[2][32];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    const int few = a.cols < 8 ? static_cast<int>(a.cols) : 8;
    float pivot = 0;
    for (int j = 0; j < few; ++j) pivot += widen(x[j]) / static_cast<float>(few);
    const Statistics s = statistics(pivot, a.cols, a.eps, [&](float pivot) {
      float2 about{};
      for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) {
        const float d = widen(x[j]) - pivot;
        about.x += d;
        about.y += d * d;
      }
      return block_sum2(about, scratch[turn ^= 1]);
    });
    if (threadIdx.x == 0) {
      a.mean[row] = s.mean;
      a.rstd[row] = s.rstd;
    }
    for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) {
      const float w = a.weight ? read(a.weight, a.weight_dtype, j) + a.weight_offset : 1.f;
      const float b = a.bias ? read(a.bias, a.bias_dtype, j) : 0.f;
      y[j] = narrow<T>((widen(x[j]) - s.mean - s.rest) * s.rstd * w + b);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(512) dx_wide_kernel(BackwardArgs a) {
  __shared__ __align__(16) float2 scratch[2][32];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
    const float mean = a.mean[row], rstd = a.rstd[row];
    const auto g = [&](int64_t j) { return widen(dy[j]) * (a.weight ? read(a.weight, a.weight_dtype, j) + a.weight_offset : 1.f); };
    float2 sums{};
    for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) {
      sums.x += g(j);
      sums.y += g(j) * (widen(x[j]) - mean);
    }
    sums = block_sum2(sums, scratch[turn]);
    const float mean_g = sums.x / static_cast<float>(a.cols), c = sums.y / static_cast<float>(a.cols) * rstd * rstd;
    for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) dx[j] = narrow<T>((g(j) - mean_g - (widen(x[j]) - mean) * c) * rstd);
  }
}

// One thread a column, blockIdx.y a range of rows; consecutive threads read consecutive columns.
template <class T>
__global__ void __launch_bounds__(256) dw_db_wide_kernel(BackwardArgs a, float* partial, int64_t rows_per_part) {
  const int64_t column = blockIdx.x * int64_t{256} + threadIdx.x;
  if (column >= a.cols) return;
  const int64_t first = blockIdx.y * rows_per_part;
  const int64_t last = first + rows_per_part < a.rows ? first + rows_per_part : a.rows;
  float dw = 0, db = 0;
#pragma unroll 4
  for (int64_t row = first; row < last; ++row) {
    const float g = widen(static_cast<const T*>(a.dy)[row * a.dy_stride + column]);
    dw += g * ((widen(static_cast<const T*>(a.x)[row * a.x_stride + column]) - a.mean[row]) * a.rstd[row]);
    db += g;
  }
  float* out = partial + int64_t{blockIdx.y} * 2 * a.cols + column;
  out[0] = dw;
  out[a.cols] = db;
}

unsigned grid_for(int64_t rows) { return static_cast<unsigned>(rows < 0x7fffffff ? rows : 0x7fffffff); }

void finish(const BackwardArgs& a, const Scratch& partial, int64_t parts, const Host& host) {
  launch_early(add_partials, static_cast<unsigned>((2 * a.cols + 31) / 32), dim3(32, 32), host, a, partial.as<float>(), parts);
  check_launch("layer_norm");
}

// f(Type<T>, Type<W>): weight and bias have x's type or fp32.
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
  const ForwardPlan plan = choose(a);
  visit_types(a.dtype, a.weight_dtype, [&]<class T, class W>(Type<T>, Type<W>) {
    const auto kernel = plan.vectors == 4 ? forward_registers<T, W, 4> : forward_registers<T, W, kMaxVectors>;
    kernel<<<grid_for(a.rows), plan.threads, 0, stream_of(host)>>>(a);
  });
  check_launch("layer_norm");
}

void backward_cuda_staged(const BackwardArgs& a, const Host& host) {
  const BackwardPlan plan = choose(a, host.machine);
  const bool sums = a.dw || a.db;
  const Scratch partial = sums ? host.scratch(plan.blocks * 2 * a.cols * sizeof(float)) : Scratch{};
  const auto shared = static_cast<int>(plan.stages * plan.stage_bytes);
  visit_types(a.dtype, a.weight_dtype, [&]<class T, class W>(Type<T>, Type<W>) {
    const auto kernel = plan.threads > 512   ? backward_staged<T, W, 16, 1024>
                        : plan.elements == 8 ? backward_staged<T, W, 8, 256>
                                             : backward_staged<T, W, 16, 512>;
    // The same bound in every call: another thread may launch the kernel between this and the next line.
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(host.machine.shared_memory - kReservedShared)),
               "layer_norm", "asking for shared memory");
    kernel<<<plan.blocks, plan.threads, shared, stream_of(host)>>>(a, partial.as<float>(), plan.stages);
  });
  check_launch("layer_norm");
  if (sums) finish(a, partial, plan.blocks, host);
}

void forward_cuda_wide(const ForwardArgs& a, const Host& host) {
  const int threads = std::min(threads_for(a.cols), 512);
  visit(a.dtype, [&]<class T>(Type<T>) { forward_wide_kernel<T><<<grid_for(a.rows), threads, 0, stream_of(host)>>>(a); });
  check_launch("layer_norm");
}

void backward_cuda_wide(const BackwardArgs& a, const Host& host) {
  const int threads = std::min(threads_for(a.cols), 512);
  visit(a.dtype, [&]<class T>(Type<T>) {
    if (a.dx && a.rows > 0) dx_wide_kernel<T><<<grid_for(a.rows), threads, 0, stream_of(host)>>>(a);
    if (!a.dw && !a.db) return;
    const int64_t parts = std::clamp<int64_t>(a.rows / 64, 1, 256);
    const Scratch partial = host.scratch(parts * 2 * a.cols * sizeof(float));
    const dim3 grid(static_cast<unsigned>((a.cols + 255) / 256), static_cast<unsigned>(parts));
    dw_db_wide_kernel<T><<<grid, 256, 0, stream_of(host)>>>(a, partial.as<float>(), (a.rows + parts - 1) / parts);
    finish(a, partial, parts, host);
  });
  check_launch("layer_norm");
}

}  // namespace liger::layer_norm
