// RMSNorm rows of any width, type and alignment: the row is read again from L2 for the write.
#pragma once
#include <liger_kernel/core/cuda/column_sums.cuh>
#include <liger_kernel/core/cuda/element.cuh>
#include <liger_kernel/core/cuda/rms_rows.cuh>

namespace liger {
namespace {

template <class T, class Args>
__global__ void __launch_bounds__(512) rms_forward_wide(Args a) {
  __shared__ float scratch[2][32];
  const float offset = a.rounding == Rounding::kEachStep ? round_to<T>(a.weight_offset) : a.weight_offset;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    const T* normal = x;
    float squares = 0;
    if constexpr (kAdds<Args>) {
      const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
      T* s = static_cast<T*>(a.s) + row * a.s_stride;
      for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) s[j] = narrow<T>(widen(x[j]) + widen(residual[j]));
      normal = s;  // each thread reads what it wrote itself
    }
    for (int64_t first = threadIdx.x; first < a.cols; first += 8 * blockDim.x) {
      float part = 0;  // short chains of additions
      for (int64_t j = first; j < first + 8 * blockDim.x && j < a.cols; j += blockDim.x) part += widen(normal[j]) * widen(normal[j]);
      squares += part;
    }
    const float rstd = rstd_of<T>(block_sum(squares, scratch[turn]) / static_cast<float>(a.cols), a.eps, a.rounding);
    if (threadIdx.x == 0) a.rstd[row] = rstd;
    visit_rounding(a.rounding, [&]<Rounding kRounding>() {
      for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) {
        const float w = a.weight ? read(a.weight, a.weight_dtype, j) + offset : 1.f;
        y[j] = narrow<T>(normalise<T, kRounding>(widen(normal[j]), rstd, w));
      }
    });
  }
}

template <class T, class Args>
__global__ void __launch_bounds__(512) rms_backward_wide(Args a) {
  __shared__ float scratch[2][32];
  int turn = 0;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
    const T* x = static_cast<const T*>(normalised(a)) + row * normalised_stride(a);
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    const T* ds = static_cast<const T*>(residual_gradient(a));
    if constexpr (kAdds<Args>) ds += ds ? row * a.ds_stride : 0;
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
    const float rstd = a.rstd[row];
    const auto g = [&](int64_t j) { return widen(dy[j]) * (a.weight ? read(a.weight, a.weight_dtype, j) + a.weight_offset : 1.f); };
    float product = 0;
    for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) product += g(j) * widen(x[j]);
    const float c = block_sum(product, scratch[turn]) / static_cast<float>(a.cols) * rstd * rstd;
    for (int64_t j = threadIdx.x; j < a.cols; j += blockDim.x) {
      dx[j] = narrow<T>((g(j) - widen(x[j]) * c) * rstd + (ds ? widen(ds[j]) : 0.f));
    }
  }
}

// One thread a column, blockIdx.y a range of rows; consecutive threads read consecutive columns.
template <class T, class Args>
__global__ void __launch_bounds__(256) rms_dw_wide(Args a, float* partial_dw, int64_t rows_per_part) {
  const int64_t column = blockIdx.x * int64_t{256} + threadIdx.x;
  if (column >= a.cols) return;
  const int64_t first = blockIdx.y * rows_per_part;
  const int64_t last = first + rows_per_part < a.rows ? first + rows_per_part : a.rows;
  const bool round_hat = a.rounding != Rounding::kLast;
  float total = 0;
  for (int64_t row = first; row < last; ++row) {
    const float hat = widen(static_cast<const T*>(normalised(a))[row * normalised_stride(a) + column]) * a.rstd[row];
    total += widen(static_cast<const T*>(a.dy)[row * a.dy_stride + column]) * (round_hat ? round_to<T>(hat) : hat);
  }
  partial_dw[blockIdx.y * a.cols + column] = total;
}

template <class Args>
void launch_rms_forward_wide(const char* op, const Args& a, const Host& host) {
  const unsigned blocks = static_cast<unsigned>(a.rows < 0x7fffffff ? a.rows : 0x7fffffff);
  visit(a.dtype, [&]<class T>(Type<T>) { rms_forward_wide<T><<<blocks, 512, 0, stream_of(host)>>>(a); });
  check_launch(op);
}

template <class Args>
void launch_rms_backward_wide(const char* op, const Args& a, const Host& host) {
  const unsigned blocks = static_cast<unsigned>(a.rows < 0x7fffffff ? a.rows : 0x7fffffff);
  visit(a.dtype, [&]<class T>(Type<T>) {
    if (a.dx && a.rows > 0) rms_backward_wide<T><<<blocks, 512, 0, stream_of(host)>>>(a);
    check_launch(op);
    if (!a.dw) return;
    const int64_t parts = a.rows < 64 ? 1 : a.rows / 64 < 256 ? a.rows / 64 : 256;
    const Scratch partial = host.scratch(parts * a.cols * sizeof(float));
    const dim3 grid(static_cast<unsigned>((a.cols + 255) / 256), static_cast<unsigned>(parts));
    rms_dw_wide<T><<<grid, 256, 0, stream_of(host)>>>(a, partial.as<float>(), (a.rows + parts - 1) / parts);
    check_launch(op);
    sum_rows(partial.as<float>(), a.dw, a.dw_dtype, parts, a.cols, host);
  });
  check_launch(op);
}

}  // namespace
}  // namespace liger
