// Kernels of losses of pairs of elements (input, target) with their gradient in the same pass; kl_div and tvd use them.
//
// An op hands over its Args, whose common fields have the same names in both, and an Element:
//   bool skips(row)                         nothing of that row counts
//   float factor()                          of the sum and its gradient
//   void operator()(x, t, loss, slope)      of one element
#pragma once
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/element.cuh>
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/pairs.h>

namespace liger {
namespace {

// 16 bytes of T, and as many fp32 values beside them.
template <class Element>
struct PairVector {
  using T = Element;
  static constexpr int kSize = Vec<T>::kSize;
  using Raw = Vec<T>;
  __device__ __forceinline__ static Raw load(const void* p, DType, int64_t i) { return Raw::load_streaming(static_cast<const T*>(p) + i); }
  __device__ __forceinline__ static void store(const float (&v)[kSize], void* p, DType, int64_t i) {
    Raw::from_float(v).store(static_cast<T*>(p) + i);
  }
  __device__ __forceinline__ static void store_fp32(const float (&v)[kSize], float* p) {
#pragma unroll
    for (int k = 0; k < kSize; k += 4) *reinterpret_cast<float4*>(p + k) = {v[k], v[k + 1], v[k + 2], v[k + 3]};
  }
  __device__ __forceinline__ static void load_fp32(float (&v)[kSize], const float* p) {
#pragma unroll
    for (int k = 0; k < kSize; k += 4) {
      const float4 f = __ldcs(reinterpret_cast<const float4*>(p + k));
      v[k] = f.x, v[k + 1] = f.y, v[k + 2] = f.z, v[k + 3] = f.w;
    }
  }
};

// One element whose type is known at run time, for operands of two types and for any alignment.
struct PairSingle {
  using T = float;
  static constexpr int kSize = 1;
  struct Raw {
    float v;
    __device__ __forceinline__ void to_float(float (&out)[1]) const { out[0] = v; }
  };
  __device__ __forceinline__ static Raw load(const void* p, DType dtype, int64_t i) { return {read(p, dtype, i)}; }
  __device__ __forceinline__ static void store(const float (&v)[1], void* p, DType dtype, int64_t i) { write(v[0], p, dtype, i); }
  __device__ __forceinline__ static void store_fp32(const float (&v)[1], float* p) { *p = v[0]; }
  __device__ __forceinline__ static void load_fp32(float (&v)[1], const float* p) { v[0] = *p; }
};

// Where an item lies: its row and first column.
struct PairItem {
  __device__ __forceinline__ PairItem(const PairPlan& plan, int64_t item) {
    if (plan.chunks == plan.items) {  // one row
      row = 0;
    } else if (plan.items <= 0x7fffffff) {
      row = static_cast<uint32_t>(item) / static_cast<uint32_t>(plan.chunks);
    } else {
      row = item / plan.chunks;
    }
    column = (item - row * plan.chunks) * plan.span;
  }
  int64_t row, column;
};

// partial: [blocks] sums, or nullptr.
template <class Access, class Args, class Element>
__global__ void __launch_bounds__(kPairThreads) pairs_forward(Args a, PairPlan plan, Element element, float* partial) {
  constexpr int kSize = Access::kSize;
  __shared__ float scratch[32];
  const float factor = element.factor();
  float total = 0;
  PairItem now(plan, blockIdx.x);
  bool skip = element.skips(now.row);
  for (int64_t item = blockIdx.x; item < plan.items; item += gridDim.x) {
    // Whether the next row counts is asked an item ahead: loads wait for the answer.
    const PairItem next(plan, item + gridDim.x < plan.items ? item + gridDim.x : item);
    const bool skip_next = element.skips(next.row);
    const int64_t first = now.column + int64_t{threadIdx.x} * kSize, step = int64_t{blockDim.x} * kSize;
    const int64_t input = now.row * a.input_stride, target = now.row * a.target_stride;
    const int64_t loss = now.row * a.loss_stride, grad = now.row * a.grad_stride;

    // 1. Load everything.
    typename Access::Raw x[kPairAccesses], t[kPairAccesses];
#pragma unroll
    for (int i = 0; i < kPairAccesses; ++i) {
      const int64_t j = first + i * step;
      if (skip || j + kSize > a.cols) continue;
      x[i] = Access::load(a.input, a.dtype, input + j);
      t[i] = Access::load(a.target, a.target_dtype, target + j);
    }

    // 2. Compute and write; the last columns of a row that fill no vector go one by one.
#pragma unroll
    for (int i = 0; i < kPairAccesses; ++i) {
      const int64_t j = first + i * step;
      if (j + kSize > a.cols) {
        for (int64_t k = j; k < a.cols; ++k) {
          float value = 0, slope = 0;
          if (!skip) element(read(a.input, a.dtype, input + k), read(a.target, a.target_dtype, target + k), value, slope);
          total += value;
          if (a.loss) a.loss[loss + k] = value;
          if (a.grad) write(slope * factor, a.grad, a.dtype, grad + k);
        }
        continue;
      }
      float xs[kSize], ts[kSize];
      if (skip) {
#pragma unroll
        for (int k = 0; k < kSize; ++k) xs[k] = ts[k] = 0;
      } else {
        x[i].to_float(xs), t[i].to_float(ts);
        float sum = 0;
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          float value, slope;
          element(xs[k], ts[k], value, slope);
          xs[k] = value, ts[k] = slope * factor;
          sum += value;
        }
        total += sum;
      }
      if (a.loss) Access::store_fp32(xs, a.loss + loss + j);
      if (a.grad) Access::store(ts, a.grad, a.dtype, grad + j);
    }
    now = next;
    skip = skip_next;
  }
  if (partial == nullptr) return;
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

template <class Element>
__global__ void __launch_bounds__(1024) add_pairs(const float* partial, int64_t count, Element element, float* total) {
  __shared__ float scratch[32];
  float sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *total = sum * element.factor();
}

// grad = slope factor dy, for a gradient dy of each element's loss or of their sum.
template <class Access, class Args, class Element>
__global__ void __launch_bounds__(kPairThreads) pairs_backward(Args a, PairPlan plan, Element element) {
  constexpr int kSize = Access::kSize;
  const float factor = a.of_total ? element.factor() * *a.dy : element.factor();
  for (int64_t item = blockIdx.x; item < plan.items; item += gridDim.x) {
    const PairItem now(plan, item);
    const int64_t row = now.row, first = now.column + int64_t{threadIdx.x} * kSize;
    const float* dys = a.of_total ? nullptr : a.dy + row * a.dy_stride;
    const bool skip = element.skips(row);
#pragma unroll
    for (int i = 0; i < kPairAccesses; ++i) {
      const int64_t j = first + i * int64_t{blockDim.x} * kSize;
      if (j + kSize > a.cols) {
        for (int64_t k = j; k < a.cols; ++k) {
          const float slope = skip ? 0.f : element.slope(a, row, k) * factor * (dys ? dys[k] : 1.f);
          write(slope, a.grad, a.dtype, row * a.grad_stride + k);
        }
        continue;
      }
      float slope[kSize], dy[kSize];
      if (skip) {
#pragma unroll
        for (int k = 0; k < kSize; ++k) slope[k] = 0;
      } else {
        element.template slopes<Access>(a, row, j, slope);
        if (dys) Access::load_fp32(dy, dys + j);
#pragma unroll
        for (int k = 0; k < kSize; ++k) slope[k] *= factor * (dys ? dy[k] : 1.f);
      }
      Access::store(slope, a.grad, a.dtype, row * a.grad_stride + j);
    }
  }
}

template <class Access, class Args, class Element>
void launch_pairs_forward(const Args& a, const Element& element, const Host& host, const char* op) {
  const PairPlan plan = cover_pairs(a.rows, a.cols, Access::kSize, host.machine);
  const Scratch partial = a.total ? host.scratch(std::max<int64_t>(plan.blocks, 1) * sizeof(float)) : Scratch{};
  if (plan.blocks > 0) {
    pairs_forward<Access><<<static_cast<unsigned>(plan.blocks), plan.threads, 0, stream_of(host)>>>(a, plan, element, partial.as<float>());
    check_launch(op);
  }
  if (!a.total) return;
  add_pairs<<<1, 1024, 0, stream_of(host)>>>(partial.as<float>(), plan.blocks, element, a.total);
  check_launch(op);
}

template <class Access, class Args, class Element>
void launch_pairs_backward(const Args& a, const Element& element, const Host& host, const char* op) {
  const PairPlan plan = cover_pairs(a.rows, a.cols, Access::kSize, host.machine);
  if (plan.blocks == 0) return;
  pairs_backward<Access><<<static_cast<unsigned>(plan.blocks), plan.threads, 0, stream_of(host)>>>(a, plan, element);
  check_launch(op);
}

}  // namespace
}  // namespace liger
