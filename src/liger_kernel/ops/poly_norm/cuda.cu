// PolyNorm on CUDA.
//
// cuda_registers: a row in the registers of one block, as raw 16-byte vectors: x (and dy) are read once, y (dx) written once.
// cuda_wide: any width and alignment; reads a row again from L2.
// All sums of a row go through one barrier. dw and db are sums of rows' sums: a persistent block adds those of its rows, and one
// small kernel adds the blocks' in a fixed order.
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/element.cuh>
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/vec.cuh>
#include <liger_kernel/ops/poly_norm/plan.h>

namespace liger::poly_norm {
namespace {

constexpr int kSums = kPowers + 1;  // of the backward: dw_3, dw_2, dw_1, db

// Every thread gets all sums. Two calls in a row need two scratches.
template <int kCount>
__device__ __forceinline__ void block_sums(float (&v)[kCount], float (*scratch)[32]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = warp_sum(v[i]);
  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  if (warps == 1) return;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) scratch[i][threadIdx.x / 32] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = warp_sum(lane < warps ? scratch[i][lane] : 0.f);
}

// The row's sums of x^6, x^4, x^2.
__device__ __forceinline__ void add_even_powers(float x, float (&sums)[kPowers]) {
  const float square = x * x, fourth = square * square;
  sums[0] += fourth * square, sums[1] += fourth, sums[2] += square;
}
// y = ((c_3 x + c_2) x + c_1) x + b, c_p = w_p r_p.
struct Polynomial {
  float c[kPowers], bias;

  // Thread 0 keeps r_p for the backward.
  __device__ __forceinline__ Polynomial(const ForwardArgs& a, const float (&sums)[kPowers], int64_t row) {
    bias = read(a.bias, a.bias_dtype, 0);
#pragma unroll
    for (int i = 0; i < kPowers; ++i) {
      const float rstd = reciprocal_root(sums[i] / static_cast<float>(a.cols) + a.eps);
      if (threadIdx.x == 0) a.rstd[row * kPowers + i] = rstd;
      c[i] = read(a.weight, a.weight_dtype, i) * rstd;
    }
  }
  __device__ __forceinline__ float operator()(float x) const { return ((c[0] * x + c[1]) * x + c[2]) * x + bias; }
};

// The row's sums of g x^3, g x^2, g x, g.
__device__ __forceinline__ void add_products(float g, float x, float (&sums)[kSums]) {
  const float gx = g * x, gxx = gx * x;
  sums[0] += gxx * x, sums[1] += gxx, sums[2] += gx, sums[3] += g;
}
// dx from the row's sums; adds the row's share of dw and db to `total`.
struct Gradient {
  float scale[kPowers], pull[kPowers];  // p w_p r_p, and that times r_p^2 m_p

  __device__ __forceinline__ Gradient(const BackwardArgs& a, const float (&sums)[kSums], int64_t row, float (&total)[kSums]) {
#pragma unroll
    for (int i = 0; i < kPowers; ++i) {
      const float rstd = a.rstd[row * kPowers + i];
      total[i] += rstd * sums[i];
      scale[i] = static_cast<float>(kPowers - i) * read(a.weight, a.weight_dtype, i) * rstd;
      pull[i] = scale[i] * (rstd * (rstd * (sums[i] / static_cast<float>(a.cols))));
    }
    total[kPowers] += sums[kPowers];
  }
  __device__ __forceinline__ float operator()(float g, float x) const {
    const float square = x * x;
    return g * ((scale[0] * x + scale[1]) * x + scale[2]) - x * ((pull[0] * square + pull[1]) * square + pull[2]);
  }
};

template <class T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) forward_registers(ForwardArgs a) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ float scratch[2][kPowers][32];
  const int cols = static_cast<int>(a.cols);
  const auto column_of = [](int v) { return static_cast<int>(threadIdx.x + v * blockDim.x) * kSize; };
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    // 1. Load the row; zeros beyond its end add nothing.
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    Vec<T> held[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) held[v] = column_of(v) < cols ? Vec<T>::load(x + column_of(v)) : Vec<T>{};

    // 2. Its sums.
    float sums[kPowers] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[kSize];
      held[v].to_float(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) add_even_powers(values[i], sums);
    }
    block_sums(sums, scratch[turn]);
    const Polynomial polynomial(a, sums, row);

    // 3. Evaluate and write.
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= cols) break;
      float values[kSize];
      held[v].to_float(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = polynomial(values[i]);
      Vec<T>::from_float(values).store_streaming(y + column_of(v));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kWideThreads) forward_wide_kernel(ForwardArgs a) {
  __shared__ float scratch[2][kPowers][32];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    float sums[kPowers] = {};
    for (int64_t j = threadIdx.x; j < a.cols; j += kWideThreads) add_even_powers(widen(x[j]), sums);
    block_sums(sums, scratch[turn]);
    const Polynomial polynomial(a, sums, row);
    for (int64_t j = threadIdx.x; j < a.cols; j += kWideThreads) y[j] = narrow<T>(polynomial(widen(x[j])));
  }
}

// partial: [blocks, 4].
template <class T, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) backward_registers(BackwardArgs a, float* partial) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ float scratch[2][kSums][32];
  const int cols = static_cast<int>(a.cols);
  const auto column_of = [](int v) { return static_cast<int>(threadIdx.x + v * blockDim.x) * kSize; };
  float total[kSums] = {};
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    // 1. Load x and dy.
    const T* px = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* pdy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    Vec<T> x[kVectors], dy[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x[v] = column_of(v) < cols ? Vec<T>::load(px + column_of(v)) : Vec<T>{};
      dy[v] = column_of(v) < cols ? Vec<T>::load(pdy + column_of(v)) : Vec<T>{};
    }

    // 2. The row's sums.
    float sums[kSums] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float xs[kSize], gs[kSize];
      x[v].to_float(xs);
      dy[v].to_float(gs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) add_products(gs[i], xs[i], sums);
    }
    block_sums(sums, scratch[turn]);
    const Gradient gradient(a, sums, row, total);

    // 3. Write dx.
    if (a.dx == nullptr) continue;
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= cols) break;
      float xs[kSize], gs[kSize];
      x[v].to_float(xs);
      dy[v].to_float(gs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) xs[i] = gradient(gs[i], xs[i]);
      Vec<T>::from_float(xs).store_streaming(dx + column_of(v));
    }
  }

  // 4. This block's share of dw and db; every thread has it.
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) partial[blockIdx.x * kSums + i] = total[i];
  }
}

template <class T>
__global__ void __launch_bounds__(kWideThreads) backward_wide_kernel(BackwardArgs a, float* partial) {
  __shared__ float scratch[2][kSums][32];
  float total[kSums] = {};
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    float sums[kSums] = {};
    for (int64_t j = threadIdx.x; j < a.cols; j += kWideThreads) add_products(widen(dy[j]), widen(x[j]), sums);
    block_sums(sums, scratch[turn]);
    const Gradient gradient(a, sums, row, total);
    if (a.dx == nullptr) continue;
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
    for (int64_t j = threadIdx.x; j < a.cols; j += kWideThreads) dx[j] = narrow<T>(gradient(widen(dy[j]), widen(x[j])));
  }
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) partial[blockIdx.x * kSums + i] = total[i];
  }
}

// One block; warp i adds the i-th sum of all blocks.
__global__ void __launch_bounds__(32 * kSums) add_partials(BackwardArgs a, const float* partial, int parts) {
  const int i = threadIdx.x / 32;
  float total = 0;
  for (int part = threadIdx.x % 32; part < parts; part += 32) total += partial[part * kSums + i];
  total = warp_sum(total);
  if (threadIdx.x % 32 != 0) return;
  if (i < kPowers && a.dw) write(total, a.dw, a.weight_dtype, i);
  if (i == kPowers && a.db) write(total, a.db, a.bias_dtype, 0);
}

void finish(const BackwardArgs& a, const float* partial, int parts, const Host& host) {
  check_launch("poly_norm");
  if (!a.dw && !a.db) return;
  add_partials<<<1, 32 * kSums, 0, stream_of(host)>>>(a, partial, parts);
  check_launch("poly_norm");
}

unsigned grid_for(int64_t rows) { return static_cast<unsigned>(rows < 0x7fffffff ? rows : 0x7fffffff); }

}  // namespace

void forward_cuda_registers(const ForwardArgs& a, const Host& host) {
  const Plan plan = choose(a);
  visit(a.dtype, [&]<class T>(Type<T>) {
    const auto kernel = plan.vectors == 1 ? forward_registers<T, 1> : plan.vectors == 2 ? forward_registers<T, 2> : forward_registers<T, 4>;
    kernel<<<grid_for(a.rows), plan.threads, 0, stream_of(host)>>>(a);
  });
  check_launch("poly_norm");
}

void forward_cuda_wide(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) { forward_wide_kernel<T><<<grid_for(a.rows), kWideThreads, 0, stream_of(host)>>>(a); });
  check_launch("poly_norm");
}

void backward_cuda_registers(const BackwardArgs& a, const Host& host) {
  const Plan plan = choose(a, host.machine);
  const Scratch partial = host.scratch(plan.blocks * kSums * sizeof(float));
  visit(a.dtype, [&]<class T>(Type<T>) {
    const auto kernel = plan.vectors == 1   ? backward_registers<T, 1>
                        : plan.vectors == 2 ? backward_registers<T, 2>
                                            : backward_registers<T, 4>;
    kernel<<<plan.blocks, plan.threads, 0, stream_of(host)>>>(a, partial.as<float>());
  });
  finish(a, partial.as<float>(), plan.blocks, host);
}

void backward_cuda_wide(const BackwardArgs& a, const Host& host) {
  const int blocks = resident_blocks(a.rows, kWideThreads, host.machine);
  const Scratch partial = host.scratch(blocks * kSums * sizeof(float));
  visit(a.dtype, [&]<class T>(Type<T>) { backward_wide_kernel<T><<<blocks, kWideThreads, 0, stream_of(host)>>>(a, partial.as<float>()); });
  finish(a, partial.as<float>(), blocks, host);
}

}  // namespace liger::poly_norm
