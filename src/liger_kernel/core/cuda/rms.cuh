// RMSNorm rows on CUDA, with (fused_add_rms_norm) or without (rms_norm) the residual addition: both ops' arguments fit.
//
// rms_forward: x, and the residual, are read once, their sum stays in registers as raw 16-byte vectors, results are written once.
// rms_backward: persistent blocks. x, dy and ds of the next rows are on their way to shared memory (cp.async) while a row is worked
//   on, so that loads never wait for a row's reduction; a thread copies, and later reads, its own vectors and no other, so no
//   barrier guards them. dw stays in fp32 registers over all rows.
//   Each block writes one fp32 partial row of dw (column_sums.cuh adds them).
#pragma once
#include <liger_kernel/core/cuda/async_copy.cuh>
#include <liger_kernel/core/cuda/column_sums.cuh>
#include <liger_kernel/core/cuda/rms_rows.cuh>

namespace liger {
namespace {

// The weights of one vector of T, as they lie in memory, and as fp32 with the offset; 1 without a weight.
template <class T, class W>
struct Weights {
  static constexpr int kSize = Vec<T>::kSize, kPart = Vec<W>::kSize;
  Vec<W> raw[kSize / kPart];

  __device__ __forceinline__ static Weights load(const W* weight, int column) {
    Weights w{};
#pragma unroll
    for (int i = 0; i < kSize / kPart; ++i) {
      if (weight) w.raw[i] = Vec<W>::load(weight + column + i * kPart);
    }
    return w;
  }
  __device__ __forceinline__ void to_float(bool given, float offset, float (&w)[kSize]) const {
#pragma unroll
    for (int i = 0; i < kSize; i += kPart) {
      float part[kPart];
      raw[i / kPart].to_float(part);
#pragma unroll
      for (int k = 0; k < kPart; ++k) w[i + k] = given ? part[k] + offset : 1.f;
    }
  }
};

// The sum over the threads of a row: neighbours in a warp, or the whole block.
__device__ __forceinline__ float row_sum(float v, int lanes, float* scratch) {
  if (lanes > 32) return block_sum(v, scratch);
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}
__device__ __forceinline__ int row_lane(int lanes) { return lanes > 32 ? threadIdx.x : threadIdx.x & (lanes - 1); }

template <class T, class W, int kVectors, class Args>
__global__ void __launch_bounds__(kRowMaxForwardThreads) rms_forward(Args a, int lanes) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ float scratch[32];
  const auto* weight = static_cast<const W*>(a.weight);
  const float offset = a.rounding == Rounding::kEachStep ? round_to<T>(a.weight_offset) : a.weight_offset;
  const int lane = row_lane(lanes), rows_per_block = static_cast<int>(blockDim.x) / lanes;
  const int64_t row = int64_t{blockIdx.x} * rows_per_block + threadIdx.x / lanes;
  const int cols = row < a.rows ? static_cast<int>(a.cols) : 0;  // a row too many takes part in the sum and does nothing else
  const auto column_of = [&](int v) { return (lane + v * lanes) * kSize; };

  // 1. Load the row, and the weights, which then arrive while the squares are summed.
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  Vec<T> held[kVectors];
  Weights<T, W> weights[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) held[v] = column_of(v) < cols ? Vec<T>::load(x + column_of(v)) : Vec<T>{};
  if constexpr (kAdds<Args>) {
    const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
    T* s = static_cast<T*>(a.s) + row * a.s_stride;
    Vec<T> other[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) other[v] = column_of(v) < cols ? Vec<T>::load(residual + column_of(v)) : Vec<T>{};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[kSize], addends[kSize];
      held[v].to_float(values);
      other[v].to_float(addends);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] += addends[i];
      held[v] = Vec<T>::from_float(values);
      if (column_of(v) < cols) held[v].assign(s + column_of(v));
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) weights[v] = column_of(v) < cols ? Weights<T, W>::load(weight, column_of(v)) : Weights<T, W>{};
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float values[kSize], part = 0;  // short chains of additions
    held[v].to_float(values);
#pragma unroll
    for (int i = 0; i < kSize; ++i) part += values[i] * values[i];
    squares += part;
  }

  // 2. Finish the reduction.
  const float rstd = rstd_of<T>(row_sum(squares, lanes, scratch) / static_cast<float>(a.cols), a.eps, a.rounding);
  if (lane == 0 && row < a.rows) a.rstd[row] = rstd;

  // 3. Scale and write.
  T* y = static_cast<T*>(a.y) + row * a.y_stride;
  visit_rounding(a.rounding, [&]<Rounding kRounding>() {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= cols) break;
      float values[kSize], w[kSize];
      held[v].to_float(values);
      weights[v].to_float(weight, offset, w);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = normalise<T, kRounding>(values[i], rstd, w[i]);
      Vec<T>::from_float(values).store_streaming(y + column_of(v));
    }
  });
}

template <class T, class W, int kVectors, int kMost, class Args>
__global__ void __launch_bounds__(kMost) rms_backward(Args a, float* partial_dw, int lanes, int stages) {
  constexpr int kSize = Vec<T>::kSize;
  extern __shared__ uint4 staged[];  // [stage][x, dy, ds][vector][thread]
  __shared__ float scratch[2][32];
  const auto* weight = static_cast<const W*>(a.weight);
  const T* ds = static_cast<const T*>(a.dx ? residual_gradient(a) : nullptr);
  const int streams = kAdds<Args> && ds ? 3 : 2;
  const int lane = row_lane(lanes), groups = static_cast<int>(blockDim.x) / lanes, group = threadIdx.x / lanes;
  const auto column_of = [&](int v) { return (lane + v * lanes) * kSize; };
  const auto slot = [&](int stage, int stream, int v) {
    return reinterpret_cast<Vec<T>*>(staged) + ((stage * streams + stream) * kVectors + v) * static_cast<int>(blockDim.x) + threadIdx.x;
  };
  const int64_t step = int64_t{gridDim.x} * groups, first = int64_t{blockIdx.x} * groups + group;
  // Starts the copies of a row; past the last row an empty group, so that groups can be counted.
  const auto fetch = [&](int64_t row, int stage) {
    if (row < a.rows) {
      const T* x = static_cast<const T*>(normalised(a)) + row * normalised_stride(a);
      const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (column_of(v) >= a.cols) break;
        copy_async(slot(stage, 0, v), x + column_of(v));
        copy_async(slot(stage, 1, v), dy + column_of(v));
        if constexpr (kAdds<Args>) {
          if (ds) copy_async(slot(stage, 2, v), ds + row * a.ds_stride + column_of(v));
        }
      }
    }
    commit_copies();
  };
  for (int stage = 0; stage < stages - 1; ++stage) fetch(first + stage * step, stage);

  float dw[kVectors * kSize] = {}, w[kVectors][kSize];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    (column_of(v) < a.cols ? Weights<T, W>::load(weight, column_of(v)) : Weights<T, W>{}).to_float(weight, a.weight_offset, w[v]);
  }
  int turn = 0, stage = 0;
  float next_rstd = first < a.rows ? a.rstd[first] : 0.f;
  for (int64_t row = first; row - group < a.rows; row += step, turn ^= 1, stage = stage + 1 == stages ? 0 : stage + 1) {
    // 1. Refill the stage that the previous row has left; wait for this row. The block's threads leave the loop together.
    fetch(row + (stages - 1) * step, stage == 0 ? stages - 1 : stage - 1);
    const int cols = row < a.rows ? static_cast<int>(a.cols) : 0;
    const float rstd = next_rstd;
    next_rstd = row + step < a.rows ? a.rstd[row + step] : 0.f;
    wait_copies(stages - 1);

    // 2. Sum g x; add this row to dw, with hat as the forward rounded it.
    float product = 0;
    const auto accumulate = [&]<bool kRoundHat>() {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (column_of(v) >= cols) break;
        float xs[kSize], gs[kSize];
        slot(stage, 0, v)->to_float(xs);
        slot(stage, 1, v)->to_float(gs);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          product += gs[i] * w[v][i] * xs[i];
          const float hat = xs[i] * rstd;
          dw[v * kSize + i] += gs[i] * (kRoundHat ? round_to<T>(hat) : hat);
        }
      }
    };
    if (a.rounding == Rounding::kLast) {
      accumulate.template operator()<false>();
    } else {
      accumulate.template operator()<true>();
    }
    if (a.dx == nullptr) continue;
    const float c = row_sum(product, lanes, scratch[turn]) / static_cast<float>(a.cols) * rstd * rstd;

    // 3. Write dx.
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= cols) break;
      float xs[kSize], gs[kSize];
      slot(stage, 0, v)->to_float(xs);
      slot(stage, 1, v)->to_float(gs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) xs[i] = (gs[i] * w[v][i] - xs[i] * c) * rstd;
      if (kAdds<Args> && ds) {
        slot(stage, 2, v)->to_float(gs);
#pragma unroll
        for (int i = 0; i < kSize; ++i) xs[i] += gs[i];
      }
      Vec<T>::from_float(xs).store_streaming(dx + column_of(v));
    }
  }

  // 4. This block's share of dw: its rows' in order, through shared memory.
  if (partial_dw == nullptr) return;
  wait_copies(0);
  __syncthreads();
  float* shares = reinterpret_cast<float*>(staged);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column_of(v) >= a.cols) break;
#pragma unroll
    for (int i = 0; i < kSize; ++i) shares[group * a.cols + column_of(v) + i] = dw[v * kSize + i];
  }
  __syncthreads();
  for (int64_t column = threadIdx.x; column < a.cols; column += blockDim.x) {
    float total = 0;
    for (int g = 0; g < groups; ++g) total += shares[g * a.cols + column];
    partial_dw[blockIdx.x * a.cols + column] = total;
  }
}

// f(Type<T>, Type<W>): the weight has x's type or fp32.
template <class F>
void visit_row_types(DType dtype, DType weight_dtype, F&& f) {
  visit(dtype, [&]<class T>(Type<T>) {
    if (weight_dtype == dtype) {
      f(Type<T>{}, Type<T>{});
    } else {
      f(Type<T>{}, Type<float>{});
    }
  });
}

template <class Args>
RowPlan rms_backward_plan(const Args& a, const Machine& m) {
  return plan_rows_backward(a.rows, a.cols, a.dtype, a.dx && residual_gradient(a) ? 3 : 2, m);
}

template <class Args>
void launch_rms_forward(const char* op, const Args& a, const Host& host) {
  const RowPlan p = plan_rows_forward(a.cols, a.dtype);
  const int64_t rows_per_block = p.threads / p.lanes, blocks = (a.rows + rows_per_block - 1) / rows_per_block;
  LIGER_CHECK(blocks <= 0x7fffffff, op, ": ", a.rows, " rows, at most 2^31 - 1 are supported");
  visit_row_types(a.dtype, a.weight_dtype, [&]<class T, class W>(Type<T>, Type<W>) {
    const auto kernel = p.vectors == 1   ? rms_forward<T, W, 1, Args>
                        : p.vectors == 2 ? rms_forward<T, W, 2, Args>
                        : p.vectors == 4 ? rms_forward<T, W, 4, Args>
                                         : rms_forward<T, W, 8, Args>;
    kernel<<<static_cast<unsigned>(blocks), p.threads, 0, stream_of(host)>>>(a, p.lanes);
  });
  check_launch(op);
}

// Launch bounds follow the threads: few may have many registers.
template <class T, class W, class Args>
auto rms_backward_kernel(const RowPlan& p) {
  if (p.threads > 512) return p.vectors == 2 ? rms_backward<T, W, 2, 1024, Args> : rms_backward<T, W, 4, 1024, Args>;
  if (p.threads > 320) return rms_backward<T, W, 2, 512, Args>;
  return p.vectors == 1   ? rms_backward<T, W, 1, 320, Args>
         : p.vectors == 2 ? rms_backward<T, W, 2, 320, Args>
                          : rms_backward<T, W, 4, 320, Args>;
}

template <class Args>
void launch_rms_backward(const char* op, const Args& a, const Host& host) {
  const RowPlan p = rms_backward_plan(a, host.machine);
  const Scratch partial = a.dw ? host.scratch(p.blocks * a.cols * sizeof(float)) : Scratch{};
  visit_row_types(a.dtype, a.weight_dtype, [&]<class T, class W>(Type<T>, Type<W>) {
    const auto kernel = rms_backward_kernel<T, W, Args>(p);
    // More than 48 KB a block has to be asked for. The same bound in every call: another thread may launch the kernel between this
    // and the next line.
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(host.machine.shared_memory - kRowOwnShared)),
               op, "asking for shared memory");
    kernel<<<p.blocks, p.threads, p.shared, stream_of(host)>>>(a, partial.as<float>(), p.lanes, p.stages);
  });
  check_launch(op);
  if (a.dw) sum_rows(partial.as<float>(), a.dw, a.dw_dtype, p.blocks, a.cols, host);
  check_launch(op);
}

}  // namespace
}  // namespace liger
