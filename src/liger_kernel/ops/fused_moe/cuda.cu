// The passes between the products on CUDA; all are bound by memory. *_cuda_vector: rows of whole 16-byte vectors; *_cuda_scalar: any.
#include <algorithm>

#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/ops/fused_moe/fused_moe.h>

#include <liger_kernel/ops/swiglu/silu.inl.h>

namespace liger::fused_moe {
namespace {

constexpr const char* kOp = "fused_moe";

constexpr int kRouteThreads = 1024;
constexpr int kRouteWarps = kRouteThreads / 32;
constexpr int kItems = 8;

// Sums over the block of two counts; every thread gets both.
__device__ __forceinline__ int2 block_counts(int2 v) {
  __shared__ int2 part[kRouteWarps];
  v.x = __reduce_add_sync(~0u, v.x);
  v.y = __reduce_add_sync(~0u, v.y);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
  __syncthreads();
  int2 total = make_int2(0, 0);
  for (int w = 0; w < kRouteWarps; ++w) {
    total.x += part[w].x;
    total.y += part[w].y;
  }
  return total;
}

// Block e finds the slots of expert e, the last block those of no expert: it counts the choices of earlier experts, which says where
// its own begin, and then walks over all choices again, 8192 at a time, and gives its own their slots in order:
// slot = start + own before + own in earlier (item, warp) pairs + own in lower lanes. Blocks do not wait for one another. Everyone
// reads all choices twice, from L2: 130 experts and 32768 choices are 68 MB of int64.
template <class Index>
__global__ void __launch_bounds__(kRouteThreads) route_kernel(RouteArgs a) {
  __shared__ int before[kItems * kRouteWarps];
  __shared__ int total;
  const Index* index = static_cast<const Index*>(a.index);
  const int64_t mine = blockIdx.x;
  const auto expert = [&](int64_t i) {
    const int64_t e = index[i];
    return e < 0 || e >= a.experts ? a.experts : e;
  };

  int2 count = make_int2(0, 0);
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < a.slots; i += kRouteThreads) {
    const int64_t e = expert(i);
    count.x += e < mine;
    count.y += e == mine;
  }
  count = block_counts(count);
  if (threadIdx.x == 0) a.starts[mine] = count.x;
  if (count.y == 0) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int start = count.x;
  for (int64_t first = 0; first < a.slots; first += kItems * kRouteThreads) {
    int rank[kItems];  // among the warp's, or -1
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int64_t choice = first + i * kRouteThreads + threadIdx.x;
      const bool own = choice < a.slots && expert(choice) == mine;
      const unsigned votes = __ballot_sync(~0u, own);
      rank[i] = own ? __popc(votes & ((1u << lane) - 1)) : -1;
      if (lane == 0) before[i * kRouteWarps + warp] = __popc(votes);
    }
    __syncthreads();
    if (warp == 0) {  // exclusive prefix sums of the 256 counts, 8 consecutive ones a lane
      constexpr int kEach = kItems * kRouteWarps / 32;
      int own[kEach], sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        own[i] = before[lane * kEach + i];
        sum += own[i];
      }
      int inclusive = sum;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, inclusive, step);
        if (lane >= step) inclusive += other;
      }
      int running = inclusive - sum;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        before[lane * kEach + i] = running;
        running += own[i];
      }
      if (lane == 31) total = running;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (rank[i] < 0) continue;
      const int64_t choice = first + i * kRouteThreads + threadIdx.x;
      const int slot = start + before[i * kRouteWarps + warp] + rank[i];
      a.order[slot] = static_cast<int32_t>(choice);
      a.token[slot] = static_cast<int32_t>(choice / a.top_k);
      a.place[choice] = slot;
    }
    start += total;
    __syncthreads();  // `before` and `total` are read; the next round writes them
  }
}

// A block adds up one token's rows: each is read once, the result written once.
template <class T, class Access>
__global__ void combine_kernel(CombineArgs a) {
  constexpr int kSize = Access::kSize;
  const int64_t token = blockIdx.x;
  const int32_t* place = a.place + token * a.top_k;
  const float* weight = a.weight ? a.weight + token * a.top_k : nullptr;
  const int32_t used = a.starts[a.experts];
  for (int64_t j = int64_t{threadIdx.x} * kSize; j < a.cols; j += int64_t{blockDim.x} * kSize) {
    float sum[kSize] = {};
#pragma unroll 4
    for (int64_t k = 0; k < a.top_k; ++k) {
      const int32_t slot = place[k];
      if (slot >= used) continue;
      float v[kSize];
      Access::load_streaming(static_cast<const T*>(a.y) + slot * a.cols + j).to_float(v);
      const float w = weight ? weight[k] : 1.f;
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum[i] += w * v[i];
    }
    Access::from_float(sum).store(static_cast<T*>(a.out) + token * a.cols + j);
  }
}

// A block works on one slot: one pass over its rows, and one sum over the block.
template <class T, class Access>
__global__ void gate_gradient_kernel(GateGradientArgs a) {
  constexpr int kSize = Access::kSize;
  __shared__ float scratch[32];
  const int64_t slot = blockIdx.x;
  const int32_t choice = a.order[slot];
  if (slot >= a.starts[a.experts]) {
    if (a.dweight && threadIdx.x == 0) a.dweight[choice] = 0;
    return;
  }
  const swiglu::Silu<T> act{1.f};
  const float weight = a.weight[choice];
  const T* da = a.da ? static_cast<const T*>(a.da) + slot * a.cols : nullptr;
  const T* gate = static_cast<const T*>(a.h) + slot * 2 * a.cols;
  const T* up = gate + a.cols;
  T* dgate = a.dh ? static_cast<T*>(a.dh) + slot * 2 * a.cols : nullptr;
  T* dup = dgate ? dgate + a.cols : nullptr;
  T* weighted = a.weighted ? static_cast<T*>(a.weighted) + slot * a.cols : nullptr;
  float dot = 0;
  for (int64_t j = int64_t{threadIdx.x} * kSize; j < a.cols; j += int64_t{blockDim.x} * kSize) {
    float g[kSize], u[kSize], d[kSize] = {}, v[kSize];
    Access::load_streaming(gate + j).to_float(g);
    Access::load_streaming(up + j).to_float(u);
    if (da) Access::load_streaming(da + j).to_float(d);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      float slope;
      const float value = act.value(g[i], slope), out = round_to<T>(round_to<T>(value) * u[i]);  // as forward stored it
      dot += d[i] * out;
      d[i] *= weight;
      v[i] = weight * out;
      g[i] = d[i] * u[i] * slope;
      u[i] = d[i] * value;
    }
    if (weighted) Access::from_float(v).store(weighted + j);
    if (dgate) {
      Access::from_float(g).store(dgate + j);
      Access::from_float(u).store(dup + j);
    }
  }
  if (!a.dweight) return;
  dot = block_sum(dot, scratch);
  if (threadIdx.x == 0) a.dweight[choice] = dot;
}

// Threads for rows of `count` accesses: two or more accesses a thread where the row is long enough.
inline unsigned threads_for(int64_t count) { return count >= 512 ? 256 : count > 64 ? 128 : count > 32 ? 64 : 32; }

template <template <class> class Access>
void launch(const CombineArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    combine_kernel<T, Access<T>><<<static_cast<unsigned>(a.tokens), threads_for(a.cols / Access<T>::kSize), 0, stream_of(host)>>>(a);
  });
  check_launch(kOp);
}
template <template <class> class Access>
void launch(const GateGradientArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    gate_gradient_kernel<T, Access<T>><<<static_cast<unsigned>(a.slots), threads_for(a.cols / Access<T>::kSize), 0, stream_of(host)>>>(a);
  });
  check_launch(kOp);
}

}  // namespace

void route_cuda(const RouteArgs& a, const Host& host) {
  const unsigned blocks = static_cast<unsigned>(a.experts + 1);
  if (a.wide) {
    route_kernel<int64_t><<<blocks, kRouteThreads, 0, stream_of(host)>>>(a);
  } else {
    route_kernel<int32_t><<<blocks, kRouteThreads, 0, stream_of(host)>>>(a);
  }
  check_launch(kOp);
}

void combine_cuda_vector(const CombineArgs& a, const Host& host) { launch<Vec>(a, host); }
void combine_cuda_scalar(const CombineArgs& a, const Host& host) { launch<Single>(a, host); }
void gate_gradient_cuda_vector(const GateGradientArgs& a, const Host& host) { launch<Vec>(a, host); }
void gate_gradient_cuda_scalar(const GateGradientArgs& a, const Host& host) { launch<Single>(a, host); }

void fetch_cuda(const FetchArgs& a, const Host& host) {
  check_cuda(cudaMemcpyAsync(a.out, a.starts, a.count * sizeof(int32_t), cudaMemcpyDeviceToHost, stream_of(host)), kOp,
             "reading the experts' row counts");
  check_cuda(cudaStreamSynchronize(stream_of(host)), kOp, "reading the experts' row counts");
}

void clear_cuda(const ClearArgs& a, const Host& host) {
  check_cuda(cudaMemsetAsync(a.data, 0, a.bytes, stream_of(host)), kOp, "clearing a gradient");
}

}  // namespace liger::fused_moe
