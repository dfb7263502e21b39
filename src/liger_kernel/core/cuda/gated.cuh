// Elementwise gated units on CUDA: c = round(act(a)) * b * scale and its gradients; formulas and rounding as in
// core/cpu/gated.inl.h. Memory bound: two streams in and one out forward, three in and two out backward. A thread
// issues all its loads before it computes anything; sigmoid goes through ex2.approx and
// rcp.approx, since an IEEE division alone costs more instructions than memory leaves time for in 16-bit types.
#pragma once
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/vec.cuh>
#include <liger_kernel/core/gated.h>

#define LIGER_ACTIVATION __device__ __forceinline__

namespace liger {
namespace {

// 1 / x within one unit in the last place; 0 from 2^126 on.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Correctly rounded for fp32 operands.
template <class T>
__device__ __forceinline__ float reciprocal_for(float x) {
  return sizeof(T) == 4 ? __frcp_rn(x) : reciprocal(x);
}
__device__ __forceinline__ float quotient(float x, float y) { return x * reciprocal(y); }
// e^x. For fp32 operands expf (2 ULP); for 16-bit ones 2^(x log2 e), whose relative error of |x| 2^-24 their rounding hides.
template <class T>
__device__ __forceinline__ float exp_for(float x) {
  if constexpr (sizeof(T) == 4) {
    return expf(x);
  } else {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x * 1.4426950408889634f));
    return r;
  }
}
__device__ __forceinline__ float abs(float x) { return fabsf(x); }
__device__ __forceinline__ float min(float a, float b) { return fminf(a, b); }
template <class V>
__device__ __forceinline__ V splat(float v) {
  return v;
}
__device__ __forceinline__ float select(bool mask, float a, float b) { return mask ? a : b; }

// One element, with the interface of Vec: for rows that are not 16-byte aligned.
template <class T>
struct Single {
  static constexpr int kSize = 1;
  T raw;
  __device__ __forceinline__ static Single load(const T* p) { return {*p}; }
  __device__ __forceinline__ static Single load_streaming(const T* p) { return {*p}; }
  __device__ __forceinline__ void store(T* p) const { *p = raw; }
  __device__ __forceinline__ void store_streaming(T* p) const { *p = raw; }
  __device__ __forceinline__ void to_float(float (&v)[1]) const { v[0] = widen(raw); }
  __device__ __forceinline__ static Single from_float(const float (&v)[1]) { return {narrow<T>(v[0])}; }
};

// Where this thread works: its row, and the first of its columns, which are `step` apart.
struct GatedSpot {
  int64_t row, column;
  int step;
};
template <int kSize>
__device__ __forceinline__ GatedSpot gated_spot(const GatedPlan& p, int64_t block) {
  const int lane = threadIdx.x & ((1 << p.lanes_log2) - 1);
  const int64_t group = p.chunks == 1 ? block : p.chunks == p.blocks ? 0 : block / p.chunks;
  const int64_t chunk = block - group * p.chunks;
  return {group * (kGatedThreads >> p.lanes_log2) + (threadIdx.x >> p.lanes_log2), chunk * p.span + lane * kSize, kSize << p.lanes_log2};
}

template <class T, class Access, class Act, class Args>
__global__ void __launch_bounds__(kGatedThreads) gated_forward_kernel(Args x, Act act, float scale, GatedPlan plan) {
  constexpr int kSize = Access::kSize;
  const auto product = [&](float a, float b) { return round_to<T>(act.value(a)) * b * scale; };
  for (int64_t block = blockIdx.x; block < plan.blocks; block += gridDim.x) {
    const GatedSpot spot = gated_spot<kSize>(plan, block);
    if (spot.row >= x.rows) continue;
    const T* pa = static_cast<const T*>(x.a) + spot.row * x.a_stride;
    const T* pb = static_cast<const T*>(x.b) + spot.row * x.b_stride;
    T* pc = static_cast<T*>(x.c) + spot.row * x.c_stride;

    // 1. Load everything.
    Access a[kGatedForwardAccesses], b[kGatedForwardAccesses];
#pragma unroll
    for (int v = 0; v < kGatedForwardAccesses; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j + kSize > x.cols) continue;
      a[v] = Access::load(pa + j);
      b[v] = Access::load(pb + j);
    }

    // 2. Compute and write; the last columns of a row that fill no vector go one by one.
#pragma unroll
    for (int v = 0; v < kGatedForwardAccesses; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j + kSize > x.cols) {
        for (int64_t k = j; k < x.cols; ++k) pc[k] = narrow<T>(product(widen(pa[k]), widen(pb[k])));
        continue;
      }
      float as[kSize], bs[kSize];
      a[v].to_float(as);
      b[v].to_float(bs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) as[i] = product(as[i], bs[i]);
      Access::from_float(as).store_streaming(pc + j);
    }
  }
}

// da may lie over a and db over b: a thread reads its elements before it writes them, and nobody else reads them.
template <class T, class Access, class Act, class Args>
__global__ void __launch_bounds__(kGatedThreads) gated_backward_kernel(Args x, Act act, float scale, GatedPlan plan) {
  constexpr int kSize = Access::kSize;
  const auto gradients = [&](float dc, float& a, float& b) {
    float slope;
    const float g = dc * scale, value = act.value(a, slope);
    a = g * b * slope;
    b = g * (Act::kRoundInBackward ? round_to<T>(value) : value);
  };
  for (int64_t block = blockIdx.x; block < plan.blocks; block += gridDim.x) {
    const GatedSpot spot = gated_spot<kSize>(plan, block);
    if (spot.row >= x.rows) continue;
    const T* pdc = static_cast<const T*>(x.dc) + spot.row * x.dc_stride;
    const T* pa = static_cast<const T*>(x.a) + spot.row * x.a_stride;
    const T* pb = static_cast<const T*>(x.b) + spot.row * x.b_stride;
    T* pda = x.da ? static_cast<T*>(x.da) + spot.row * x.da_stride : nullptr;
    T* pdb = x.db ? static_cast<T*>(x.db) + spot.row * x.db_stride : nullptr;

    // 1. Load everything; b is needed for da alone.
    Access dc[kGatedBackwardAccesses], a[kGatedBackwardAccesses], b[kGatedBackwardAccesses];
#pragma unroll
    for (int v = 0; v < kGatedBackwardAccesses; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j + kSize > x.cols) continue;
      dc[v] = Access::load(pdc + j);
      a[v] = Access::load(pa + j);
      b[v] = pda ? Access::load(pb + j) : Access{};
    }

    // 2. Compute and write.
#pragma unroll
    for (int v = 0; v < kGatedBackwardAccesses; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j + kSize > x.cols) {
        for (int64_t k = j; k < x.cols; ++k) {
          float da = widen(pa[k]), db = widen(pb[k]);
          gradients(widen(pdc[k]), da, db);
          if (pda) pda[k] = narrow<T>(da);
          if (pdb) pdb[k] = narrow<T>(db);
        }
        continue;
      }
      float dcs[kSize], das[kSize], dbs[kSize];
      dc[v].to_float(dcs);
      a[v].to_float(das);
      b[v].to_float(dbs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) gradients(dcs[i], das[i], dbs[i]);
      if (pda) Access::from_float(das).store_streaming(pda + j);
      if (pdb) Access::from_float(dbs).store_streaming(pdb + j);
    }
  }
}

inline unsigned gated_grid(const GatedPlan& p) { return static_cast<unsigned>(p.blocks < 0x7fffffff ? p.blocks : 0x7fffffff); }

template <class T, class Access, class Act, class Args>
void launch_gated_forward(const char* op, const Args& x, const Act& act, float scale, const Host& host) {
  const GatedPlan plan = cover_gated(x.rows, x.cols, Access::kSize, kGatedForwardAccesses);
  gated_forward_kernel<T, Access><<<gated_grid(plan), kGatedThreads, 0, stream_of(host)>>>(x, act, scale, plan);
  check_launch(op);
}
template <class T, class Access, class Act, class Args>
void launch_gated_backward(const char* op, const Args& x, const Act& act, float scale, const Host& host) {
  const GatedPlan plan = cover_gated(x.rows, x.cols, Access::kSize, kGatedBackwardAccesses);
  gated_backward_kernel<T, Access><<<gated_grid(plan), kGatedThreads, 0, stream_of(host)>>>(x, act, scale, plan);
  check_launch(op);
}

}  // namespace
}  // namespace liger
