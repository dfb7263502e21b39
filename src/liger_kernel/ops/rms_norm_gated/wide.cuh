// Gated RMSNorm rows of any width, type and alignment: rows are read again from L2 for the write. blockIdx.y counts groups of columns.
#pragma once
#include <liger_kernel/core/cuda/column_sums.cuh>
#include <liger_kernel/core/cuda/element.cuh>
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/ops/rms_norm_gated/plan.h>

#include <liger_kernel/ops/rms_norm_gated/gate.inl.h>

namespace liger::rms_norm_gated {
namespace {

// One row of one group: its elements as fp32.
template <class T, class Args>
struct Spot {
  const T *x, *gate;
  const Args& a;
  const Gate<T> act;
  int64_t first;

  __device__ Spot(const Args& args, int64_t row, int64_t group)
      : x(static_cast<const T*>(args.x) + row * args.x_stride + group * args.group_size),
        gate(args.gate ? static_cast<const T*>(args.gate) + row * args.gate_stride + group * args.group_size : nullptr),
        a(args),
        act(Gate<T>::of(args)),
        first(group * args.group_size) {}

  __device__ float z(int64_t j) const { return gate ? widen(gate[j]) : kOpen; }
  __device__ float value(int64_t j) const { return act.value(z(j)); }
  __device__ float value(int64_t j, float& slope) const { return act.value(z(j), slope); }
  // What is normalised.
  __device__ float h(int64_t j) const { return a.norm_first ? widen(x[j]) : widen(x[j]) * value(j); }
  __device__ float weight(int64_t j) const { return a.weight ? read(a.weight, a.weight_dtype, first + j) : 1.f; }
};

template <class T>
__global__ void __launch_bounds__(512) forward_wide(ForwardArgs a, Roundings round, int64_t groups) {
  __shared__ float scratch[2][32];
  int turn = 0;
  for (int64_t group = blockIdx.y; group < groups; group += gridDim.y) {
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
      const Spot<T, ForwardArgs> spot(a, row, group);
      T* y = static_cast<T*>(a.y) + row * a.y_stride + spot.first;
      float squares = 0;
      for (int64_t first = threadIdx.x; first < a.group_size; first += 8 * blockDim.x) {
        float part = 0;  // short chains of additions
        for (int64_t j = first; j < first + 8 * blockDim.x && j < a.group_size; j += blockDim.x) {
          const float h = spot.h(j);
          part += h * h;
        }
        squares += part;
      }
      const float rstd = reciprocal_root(block_sum(squares, scratch[turn]) / static_cast<float>(a.group_size) + a.eps);
      if (threadIdx.x == 0) a.rstd[row * groups + group] = rstd;
      for (int64_t j = threadIdx.x; j < a.group_size; j += blockDim.x) {
        const float scaled = round.scaled<T>(spot.h(j) * rstd, spot.weight(j));
        y[j] = narrow<T>(a.norm_first ? scaled * spot.value(j) : scaled);
      }
    }
  }
}

// dx and dgate.
template <class T>
__global__ void __launch_bounds__(512) backward_wide(BackwardArgs a, Roundings round, int64_t groups) {
  __shared__ float scratch[2][32];
  int turn = 0;
  for (int64_t group = blockIdx.y; group < groups; group += gridDim.y) {
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, turn ^= 1) {
      const Spot<T, BackwardArgs> spot(a, row, group);
      const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride + spot.first;
      T* dx = a.dx ? static_cast<T*>(a.dx) + row * a.dx_stride + spot.first : nullptr;
      T* dgate = a.dgate ? static_cast<T*>(a.dgate) + row * a.dgate_stride + spot.first : nullptr;
      const float rstd = a.rstd[row * groups + group];
      const auto g = [&](int64_t j) { return widen(dy[j]) * (a.norm_first ? spot.value(j) : 1.f) * spot.weight(j); };
      float product = 0;
      for (int64_t j = threadIdx.x; j < a.group_size; j += blockDim.x) product += g(j) * spot.h(j);
      const float c = block_sum(product, scratch[turn]) / static_cast<float>(a.group_size) * rstd * rstd;
      for (int64_t j = threadIdx.x; j < a.group_size; j += blockDim.x) {
        float slope;
        const float x = widen(spot.x[j]), value = spot.value(j, slope), dh = (g(j) - spot.h(j) * c) * rstd;
        if (dx) dx[j] = narrow<T>(a.norm_first ? dh : dh * value);
        if (dgate) {
          dgate[j] = narrow<T>((a.norm_first ? widen(dy[j]) * round.scaled<T>(x * rstd, spot.weight(j)) : dh * x) * slope);
        }
      }
    }
  }
}

// One thread a column, blockIdx.y a range of rows; consecutive threads read consecutive columns.
template <class T>
__global__ void __launch_bounds__(256) dw_wide(BackwardArgs a, Roundings round, int64_t groups, float* partial_dw, int64_t rows_per_part) {
  const int64_t column = blockIdx.x * int64_t{256} + threadIdx.x;
  if (column >= a.cols) return;
  const int64_t group = column / a.group_size, j = column - group * a.group_size;
  const int64_t first = blockIdx.y * rows_per_part;
  const int64_t last = first + rows_per_part < a.rows ? first + rows_per_part : a.rows;
  float total = 0;
  for (int64_t row = first; row < last; ++row) {
    const Spot<T, BackwardArgs> spot(a, row, group);
    const float upstream = widen(static_cast<const T*>(a.dy)[row * a.dy_stride + column]);
    const float hat = round.rounded_hat<T>(spot.h(j) * a.rstd[row * groups + group]);
    total += (a.norm_first ? upstream * spot.value(j) : upstream) * hat;
  }
  partial_dw[blockIdx.y * a.cols + column] = total;
}

}  // namespace
}  // namespace liger::rms_norm_gated
