// Dynamic tanh on CUDA: one pass each way. A thread keeps its columns over all rows of its block, with gamma, beta and the sums of
// dgamma and dbeta in registers, so that rows need neither a barrier nor a reduction; it has the loads of several rows in flight.
// Each block writes one fp32 row of partial sums; a second kernel adds those in a fixed order.
// cuda_vector: 16-byte vectors of columns; cuda_scalar: any width and alignment, one column a thread.
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/element.cuh>
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/ops/dyt/plan.h>

namespace liger::dyt {
namespace {

constexpr int kForwardRows = 4;   // in flight
constexpr int kBackwardRows = 2;  // of x and of dy

template <class T, class Access>
__global__ void __launch_bounds__(kMaxThreads) forward_kernel(ForwardArgs a, Plan plan) {
  constexpr int kSize = Access::kSize;
  const int64_t part = blockIdx.x / plan.chunks, chunk = blockIdx.x - part * plan.chunks;
  const int64_t column = (chunk * blockDim.x + threadIdx.x) * kSize;
  if (column >= a.cols) return;
  const float alpha = read(a.alpha, a.alpha_dtype, 0);
  float gamma[kSize], beta[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    gamma[i] = read(a.gamma, a.gamma_dtype, column + i);
    beta[i] = a.beta ? read(a.beta, a.beta_dtype, column + i) : 0.f;
  }
  const T* px = static_cast<const T*>(a.x) + column;
  T* py = static_cast<T*>(a.y) + column;

  for (int64_t first = part; first < a.rows; first += plan.parts * kForwardRows) {
    Access x[kForwardRows];
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
      const int64_t row = first + r * plan.parts;
      if (row < a.rows) x[r] = Access::load_streaming(px + row * a.x_stride);
    }
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
      const int64_t row = first + r * plan.parts;
      if (row >= a.rows) break;
      float values[kSize];
      x[r].to_float(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = tanhf(alpha * values[i]) * gamma[i] + beta[i];
      Access::from_float(values).store_streaming(py + row * a.y_stride);
    }
  }
}

// columns: [parts, 2, cols], dgamma then dbeta; numbers: [blocks], dalpha. nullptr: no gradient of a parameter is wanted.
template <class T, class Access>
__global__ void __launch_bounds__(kMaxThreads) backward_kernel(BackwardArgs a, Plan plan, float* columns, float* numbers) {
  constexpr int kSize = Access::kSize;
  __shared__ float scratch[32];
  const int64_t part = blockIdx.x / plan.chunks, chunk = blockIdx.x - part * plan.chunks;
  const int64_t column = (chunk * blockDim.x + threadIdx.x) * kSize;
  const int64_t rows = column < a.cols ? a.rows : 0;  // threads beyond the last column wait for the sum of dalpha
  const float alpha = read(a.alpha, a.alpha_dtype, 0);
  float gamma[kSize], dgamma[kSize] = {}, dbeta[kSize] = {}, dalpha = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) gamma[i] = column < a.cols ? read(a.gamma, a.gamma_dtype, column + i) : 0.f;
  const T* px = static_cast<const T*>(a.x) + column;
  const T* pdy = static_cast<const T*>(a.dy) + column;

  for (int64_t first = part; first < rows; first += plan.parts * kBackwardRows) {
    Access x[kBackwardRows], dy[kBackwardRows];
#pragma unroll
    for (int r = 0; r < kBackwardRows; ++r) {
      const int64_t row = first + r * plan.parts;
      if (row >= rows) continue;
      x[r] = Access::load_streaming(px + row * a.x_stride);
      dy[r] = Access::load_streaming(pdy + row * a.dy_stride);
    }
#pragma unroll
    for (int r = 0; r < kBackwardRows; ++r) {
      const int64_t row = first + r * plan.parts;
      if (row >= rows) break;
      float xs[kSize], gs[kSize];
      x[r].to_float(xs);
      dy[r].to_float(gs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float t = tanhf(alpha * xs[i]), s = gs[i] * gamma[i] * (1.f - t * t);
        dgamma[i] += gs[i] * t;
        dbeta[i] += gs[i];
        dalpha += s * xs[i];
        xs[i] = s * alpha;
      }
      if (a.dx) Access::from_float(xs).store_streaming(static_cast<T*>(a.dx) + column + row * a.dx_stride);
    }
  }

  if (columns == nullptr) return;
  if (column < a.cols) {
    float* mine = columns + part * 2 * a.cols + column;
#pragma unroll
    for (int i = 0; i < kSize; ++i) mine[i] = dgamma[i], mine[a.cols + i] = dbeta[i];
  }
  dalpha = block_sum(dalpha, scratch);
  if (threadIdx.x == 0) numbers[blockIdx.x] = dalpha;
}

// 32 columns a block, 32 rows of threads, then a tree over the threads; the last block's first warp adds dalpha.
__global__ void __launch_bounds__(1024)
    add_partials(BackwardArgs a, const float* columns, const float* numbers, int64_t parts, int64_t blocks) {
  __shared__ float sums[32][33];
  float total = 0;
  if (blockIdx.x == gridDim.x - 1) {
    if (a.dalpha == nullptr || threadIdx.y != 0) return;
    for (int64_t i = threadIdx.x; i < blocks; i += 32) total += numbers[i];
    total = warp_sum(total);
    if (threadIdx.x == 0) write(total, a.dalpha, a.alpha_dtype, 0);
    return;
  }
  const int64_t column = blockIdx.x * int64_t{32} + threadIdx.x;
  if (column < 2 * a.cols) {
    for (int64_t part = threadIdx.y; part < parts; part += 32) total += columns[part * 2 * a.cols + column];
  }
  sums[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  total = warp_sum(sums[threadIdx.x][threadIdx.y]);
  const int64_t out = blockIdx.x * int64_t{32} + threadIdx.y;
  if (threadIdx.x != 0 || out >= 2 * a.cols) return;
  if (out < a.cols && a.dgamma) write(total, a.dgamma, a.gamma_dtype, out);
  if (out >= a.cols && a.dbeta) write(total, a.dbeta, a.beta_dtype, out - a.cols);
}

template <template <class> class Access>
void launch(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const Plan plan = choose(a, Access<T>::kSize, host.machine);
    forward_kernel<T, Access<T>><<<static_cast<unsigned>(plan.parts * plan.chunks), plan.threads, 0, stream_of(host)>>>(a, plan);
  });
  check_launch("dyt");
}

template <template <class> class Access>
void launch(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const Plan plan = choose(a, Access<T>::kSize, host.machine);
    const int64_t blocks = plan.parts * plan.chunks;
    const bool sums = a.dalpha || a.dgamma || a.dbeta;
    const Scratch columns = sums ? host.scratch(plan.parts * 2 * a.cols * sizeof(float)) : Scratch{};
    const Scratch numbers = sums ? host.scratch(blocks * sizeof(float)) : Scratch{};
    if (blocks > 0) {
      backward_kernel<T, Access<T>>
          <<<static_cast<unsigned>(blocks), plan.threads, 0, stream_of(host)>>>(a, plan, columns.as<float>(), numbers.as<float>());
      check_launch("dyt");
    }
    if (!sums) return;
    const auto grid = static_cast<unsigned>((2 * a.cols + 31) / 32 + 1);
    add_partials<<<grid, dim3(32, 32), 0, stream_of(host)>>>(a, columns.as<float>(), numbers.as<float>(), plan.parts, blocks);
    check_launch("dyt");
  });
}

}  // namespace

void forward_cuda_vector(const ForwardArgs& a, const Host& host) { launch<Vec>(a, host); }
void forward_cuda_scalar(const ForwardArgs& a, const Host& host) { launch<Single>(a, host); }
void backward_cuda_vector(const BackwardArgs& a, const Host& host) { launch<Vec>(a, host); }
void backward_cuda_scalar(const BackwardArgs& a, const Host& host) { launch<Single>(a, host); }

}  // namespace liger::dyt
