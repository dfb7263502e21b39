// Gated RMSNorm rows of whole 16-byte vectors; the plan and the helpers are rms_norm's (core/rms.h, core/cuda/rms.cuh). blockIdx.y is the
// group of columns that a block works on.
//
// forward_rows: x and the gate are read once and stay in registers. Gate first, h = x act(gate) stays there in fp32.
// backward_rows: persistent blocks. x, dy and the gate of the next rows are on their way to shared memory (cp.async) while a row is
//   worked on; a thread copies, and later reads, its own vectors and no other, so no barrier guards them. Norm first, g stays in
//   registers between the two halves (in blocks small enough to have them); gate first, the activation is computed twice. dw stays in
//   fp32 registers over all rows, and each block writes one fp32 partial row of its group (column_sums.cuh adds them).
#pragma once
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/core/cuda/rms.cuh>
#include <liger_kernel/ops/rms_norm_gated/plan.h>

#include <liger_kernel/ops/rms_norm_gated/gate.inl.h>

namespace liger::rms_norm_gated {
namespace {

// Where values are rounded to T; the same for a whole call.
struct Roundings {
  bool hat, product;

  template <class T>
  __device__ __forceinline__ float rounded_hat(float v) const {
    return hat ? round_to<T>(v) : v;
  }
  template <class T>
  __device__ __forceinline__ float scaled(float v, float w) const {
    const float result = rounded_hat<T>(v) * w;
    return product ? round_to<T>(result) : result;
  }
};
template <class Args>
Roundings roundings_of(const Args& a) {
  return {a.rounding == Rounding::kBeforeWeight, rounds_product(a)};
}

template <class T, class W, int kVectors, bool kNormFirst>
__global__ void __launch_bounds__(kRowMaxForwardThreads) forward_rows(ForwardArgs a, Roundings round, int lanes) {
  constexpr int kSize = Vec<T>::kSize;
  __shared__ float scratch[32];
  const Gate<T> act = Gate<T>::of(a);
  const int64_t first = blockIdx.y * a.group_size;
  const auto* weight = a.weight ? static_cast<const W*>(a.weight) + first : nullptr;
  const int lane = row_lane(lanes), rows_per_block = static_cast<int>(blockDim.x) / lanes;
  const int64_t row = int64_t{blockIdx.x} * rows_per_block + threadIdx.x / lanes;
  const int cols = row < a.rows ? static_cast<int>(a.group_size) : 0;  // a row too many takes part in the sum and does nothing else
  const auto column_of = [&](int v) { return (lane + v * lanes) * kSize; };

  // 1. Load the row of x and of the gate, and the weights, which then arrive while the squares are summed.
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride + first;
  const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride + first;
  Vec<T> held[kVectors], gates[kVectors];
  Weights<T, W> weights[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const bool inside = column_of(v) < cols;
    held[v] = inside ? Vec<T>::load_streaming(x + column_of(v)) : Vec<T>{};
    gates[v] = inside && a.gate ? Vec<T>::load_streaming(gate + column_of(v)) : Vec<T>{};
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) weights[v] = column_of(v) < cols ? Weights<T, W>::load(weight, column_of(v)) : Weights<T, W>{};
  const auto gates_at = [&](int v, float(&z)[kSize]) {
    gates[v].to_float(z);
#pragma unroll
    for (int i = 0; i < kSize; ++i) z[i] = a.gate ? z[i] : kOpen;
  };
  [[maybe_unused]] float h[kNormFirst ? 1 : kVectors][kSize];
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float values[kSize], part = 0;  // short chains of additions
    held[v].to_float(values);
    if constexpr (!kNormFirst) {
      float z[kSize];
      gates_at(v, z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) h[v][i] = values[i] *= act.value(z[i]);
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) part += values[i] * values[i];
    squares += part;
  }

  // 2. Finish the reduction.
  const float rstd = reciprocal_root(row_sum(squares, lanes, scratch) / static_cast<float>(a.group_size) + a.eps);
  if (lane == 0 && row < a.rows) a.rstd[row * gridDim.y + blockIdx.y] = rstd;

  // 3. Scale, gate and write.
  T* y = static_cast<T*>(a.y) + row * a.y_stride + first;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column_of(v) >= cols) break;
    float values[kSize], w[kSize];
    weights[v].to_float(weight, 0.f, w);
    if constexpr (kNormFirst) {
      float z[kSize];
      held[v].to_float(values);
      gates_at(v, z);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = round.scaled<T>(values[i] * rstd, w[i]) * act.value(z[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = round.scaled<T>(h[v][i] * rstd, w[i]);
    }
    Vec<T>::from_float(values).store_streaming(y + column_of(v));
  }
}

template <class T, class W, int kVectors, int kMost, int kBlocks, bool kNormFirst>
__global__ void __launch_bounds__(kMost, kBlocks) backward_rows(BackwardArgs a, Roundings round, float* partial_dw, int lanes, int stages) {
  constexpr int kSize = Vec<T>::kSize, kStreams = 3;
  constexpr bool kKeep = kNormFirst && kMost <= 512;
  extern __shared__ uint4 staged[];  // [stage][x, dy, gate][vector][thread]
  __shared__ float scratch[2][32];
  const Gate<T> act = Gate<T>::of(a);
  const int64_t first_column = blockIdx.y * a.group_size;
  const auto* weight = a.weight ? static_cast<const W*>(a.weight) + first_column : nullptr;
  const int lane = row_lane(lanes), groups = static_cast<int>(blockDim.x) / lanes, group = threadIdx.x / lanes;  // of threads
  const auto column_of = [&](int v) { return (lane + v * lanes) * kSize; };
  const auto slot = [&](int stage, int stream, int v) {
    return reinterpret_cast<Vec<T>*>(staged) + ((stage * kStreams + stream) * kVectors + v) * static_cast<int>(blockDim.x) + threadIdx.x;
  };
  const int64_t step = int64_t{gridDim.x} * groups, first = int64_t{blockIdx.x} * groups + group;
  // Starts the copies of a row; past the last row an empty group, so that groups can be counted.
  const auto fetch = [&](int64_t row, int stage) {
    if (row < a.rows) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride + first_column;
      const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride + first_column;
      const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride + first_column;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (column_of(v) >= a.group_size) break;
        copy_async(slot(stage, 0, v), x + column_of(v));
        copy_async(slot(stage, 1, v), dy + column_of(v));
        if (a.gate) copy_async(slot(stage, 2, v), gate + column_of(v));
      }
    }
    commit_copies();
  };
  for (int stage = 0; stage < stages - 1; ++stage) fetch(first + stage * step, stage);

  float dw[kVectors * kSize] = {}, w[kVectors][kSize];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    (column_of(v) < a.group_size ? Weights<T, W>::load(weight, column_of(v)) : Weights<T, W>{}).to_float(weight, 0.f, w[v]);
  }
  int turn = 0, stage = 0;
  const auto rstd_at = [&](int64_t row) { return row < a.rows ? a.rstd[row * gridDim.y + blockIdx.y] : 0.f; };
  float next_rstd = rstd_at(first);
  for (int64_t row = first; row - group < a.rows; row += step, turn ^= 1, stage = stage + 1 == stages ? 0 : stage + 1) {
    // 1. Refill the stage that the previous row has left; wait for this row. The block's threads leave the loop together.
    fetch(row + (stages - 1) * step, stage == 0 ? stages - 1 : stage - 1);
    const int cols = row < a.rows ? static_cast<int>(a.group_size) : 0;
    const float rstd = next_rstd;
    next_rstd = rstd_at(row + step);
    wait_copies(stages - 1);
    T* dx = a.dx ? static_cast<T*>(a.dx) + row * a.dx_stride + first_column : nullptr;
    T* dgate = a.dgate ? static_cast<T*>(a.dgate) + row * a.dgate_stride + first_column : nullptr;
    float xs[kSize], gs[kSize], zs[kSize];
    const auto read = [&](int v) {
      slot(stage, 0, v)->to_float(xs);
      slot(stage, 1, v)->to_float(gs);
      slot(stage, 2, v)->to_float(zs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) zs[i] = a.gate ? zs[i] : kOpen;
    };

    // 2. Sum g h; add this row to dw; norm first, write dgate.
    float product = 0;
    [[maybe_unused]] float kept[kKeep ? kVectors : 1][kSize];  // g
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= cols) break;
      read(v);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if constexpr (kNormFirst) {
          float slope;
          const float hat = xs[i] * rstd, t = gs[i] * act.value(zs[i], slope), g = t * w[v][i];
          if constexpr (kKeep) kept[v][i] = g;
          product += g * xs[i];
          dw[v * kSize + i] += t * round.rounded_hat<T>(hat);
          zs[i] = gs[i] * round.scaled<T>(hat, w[v][i]) * slope;
        } else {
          const float h = xs[i] * act.value(zs[i]);
          product += gs[i] * w[v][i] * h;
          dw[v * kSize + i] += gs[i] * round.rounded_hat<T>(h * rstd);
        }
      }
      if (kNormFirst && dgate) Vec<T>::from_float(zs).store_streaming(dgate + column_of(v));
    }
    if (dx == nullptr && (kNormFirst || dgate == nullptr)) continue;
    const float c = row_sum(product, lanes, scratch[turn]) / static_cast<float>(a.group_size) * rstd * rstd;

    // 3. Write dx; gate first, also dgate.
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (column_of(v) >= cols) break;
      if constexpr (kKeep) {
        slot(stage, 0, v)->to_float(xs);
      } else {
        read(v);
      }
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if constexpr (kKeep) {
          xs[i] = (kept[v][i] - xs[i] * c) * rstd;
        } else if constexpr (kNormFirst) {
          xs[i] = (gs[i] * act.value(zs[i]) * w[v][i] - xs[i] * c) * rstd;
        } else {
          float slope;
          const float value = act.value(zs[i], slope), dh = (gs[i] * w[v][i] - xs[i] * value * c) * rstd;
          zs[i] = dh * xs[i] * slope;
          xs[i] = dh * value;
        }
      }
      if (dx) Vec<T>::from_float(xs).store_streaming(dx + column_of(v));
      if (!kNormFirst && dgate) Vec<T>::from_float(zs).store_streaming(dgate + column_of(v));
    }
  }

  // 4. This block's share of dw: its rows' in order, through shared memory.
  if (partial_dw == nullptr) return;
  wait_copies(0);
  __syncthreads();
  float* shares = reinterpret_cast<float*>(staged);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column_of(v) >= a.group_size) break;
#pragma unroll
    for (int i = 0; i < kSize; ++i) shares[group * a.group_size + column_of(v) + i] = dw[v * kSize + i];
  }
  __syncthreads();
  for (int64_t column = threadIdx.x; column < a.group_size; column += blockDim.x) {
    float total = 0;
    for (int g = 0; g < groups; ++g) total += shares[g * a.group_size + column];
    partial_dw[blockIdx.x * a.cols + first_column + column] = total;
  }
}

// Launch bounds are the plan's: threads, and blocks that have to fit on a multiprocessor.
template <class T, class W, bool kNormFirst>
auto backward_kernel(const RowPlan& p) {
  if (p.threads > 512) return p.vectors == 2 ? backward_rows<T, W, 2, 1024, 1, kNormFirst> : backward_rows<T, W, 4, 1024, 1, kNormFirst>;
  if (p.threads > 320) return backward_rows<T, W, 2, 512, 1, kNormFirst>;
  return p.vectors == 1   ? backward_rows<T, W, 1, 256, 3, kNormFirst>
         : p.vectors == 2 ? backward_rows<T, W, 2, 320, 2, kNormFirst>
                          : backward_rows<T, W, 4, 128, 3, kNormFirst>;
}

}  // namespace
}  // namespace liger::rms_norm_gated
