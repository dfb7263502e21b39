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
  for (int64_t item = blockIdx.x; item < plan.items; item += gridDim.x) {
    const PairItem now(plan, item);
    const bool skip = element.skips(now.row);
    const int64_t j = now.column + int64_t{threadIdx.x} * kSize;
    const int64_t input = now.row * a.input_stride, target = now.row * a.target_stride;
    const int64_t loss = now.row * a.loss_stride, grad = now.row * a.grad_stride;
    if (j + kSize > a.cols) {  // the last columns of a row that fill no vector, one by one
      for (int64_t k = j; k < a.cols; ++k) {
        float value = 0, slope = 0;
        if (!skip) element(read(a.input, a.dtype, input + k), read(a.target, a.target_dtype, target + k), value, slope);
        total += value;
        if (a.loss) a.loss[loss + k] = value;
        if (a.grad) write(slope * factor, a.grad, a.dtype, grad + k);
      }
      continue;
    }
    float values[kSize] = {}, slopes[kSize] = {};
    if (!skip) {
      const typename Access::Raw x = Access::load(a.input, a.dtype, input + j), t = Access::load(a.target, a.target_dtype, target + j);
      float xs[kSize], ts[kSize], sum = 0;
      x.to_float(xs), t.to_float(ts);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        element(xs[k], ts[k], values[k], slopes[k]);
        slopes[k] *= factor;
        sum += values[k];
      }
      total += sum;
    }
    if (a.loss) Access::store_fp32(values, a.loss + loss + j);
    if (a.grad) Access::store(slopes, a.grad, a.dtype, grad + j);
  }
  if (partial == nullptr) return;
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// out[block] = factor * the block's share of `count` sums, in a fixed order.
template <class Factor>
__global__ void __launch_bounds__(1024) add_pairs(const float* sums, int64_t count, Factor factor, float* out) {
  __shared__ float scratch[32];
  float sum = 0;
#pragma unroll 4  // loads in flight
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) sum += sums[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) out[blockIdx.x] = sum * factor.factor();
}
struct NoFactor {
  __device__ __forceinline__ float factor() const { return 1; }
};

// grad = slope factor dy, for a gradient dy of each element's loss or of their sum.
template <class Access, class Args, class Element>
__global__ void __launch_bounds__(kPairThreads) pairs_backward(Args a, PairPlan plan, Element element) {
  constexpr int kSize = Access::kSize;
  const float factor = a.of_total ? element.factor() * *a.dy : element.factor();
  for (int64_t item = blockIdx.x; item < plan.items; item += gridDim.x) {
    const PairItem now(plan, item);
    const int64_t row = now.row, j = now.column + int64_t{threadIdx.x} * kSize;
    const float* dys = a.of_total ? nullptr : a.dy + row * a.dy_stride;
    const bool skip = element.skips(row);
    if (j + kSize > a.cols) {
      for (int64_t k = j; k < a.cols; ++k) {
        const float slope = skip ? 0.f : element.slope(a, row, k) * factor * (dys ? dys[k] : 1.f);
        write(slope, a.grad, a.dtype, row * a.grad_stride + k);
      }
      continue;
    }
    float slope[kSize] = {}, dy[kSize];
    if (!skip) {
      element.template slopes<Access>(a, row, j, slope);
      if (dys) Access::load_fp32(dy, dys + j);
#pragma unroll
      for (int k = 0; k < kSize; ++k) slope[k] *= factor * (dys ? dy[k] : 1.f);
    }
    Access::store(slope, a.grad, a.dtype, row * a.grad_stride + j);
  }
}

template <class Access, class Args, class Element>
void launch_pairs_forward(const Args& a, const Element& element, const Host& host, const char* op) {
  const PairPlan plan = cover_pairs(a.rows, a.cols, Access::kSize);
  const Scratch scratch = a.total ? host.scratch((plan.blocks + kPairSums) * sizeof(float)) : Scratch{};
  float* partial = a.total ? scratch.as<float>() + kPairSums : nullptr;
  if (plan.blocks > 0) {
    pairs_forward<Access><<<static_cast<unsigned>(plan.blocks), plan.threads, 0, stream_of(host)>>>(a, plan, element, partial);
    check_launch(op);
  }
  if (!a.total) return;
  float* sums = partial;
  int64_t count = plan.blocks;
  if (count > 8 * kPairSums) {
    sums = scratch.as<float>();
    add_pairs<<<kPairSums, 1024, 0, stream_of(host)>>>(partial, count, NoFactor{}, sums);
    check_launch(op);
    count = kPairSums;
  }
  add_pairs<<<1, 1024, 0, stream_of(host)>>>(sums, count, element, a.total);
  check_launch(op);
}

template <class Access, class Args, class Element>
void launch_pairs_backward(const Args& a, const Element& element, const Host& host, const char* op) {
  const PairPlan plan = cover_pairs(a.rows, a.cols, Access::kSize);
  if (plan.blocks == 0) return;
  pairs_backward<Access><<<static_cast<unsigned>(plan.blocks), plan.threads, 0, stream_of(host)>>>(a, plan, element);
  check_launch(op);
}

}  // namespace
}  // namespace liger
