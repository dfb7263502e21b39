// A row in the registers of those who work on it, and what they exchange. See core/held_row.h.
//
//   RowTeam   the threads on one row: a warp, a block, or the blocks of a cluster (SM 9.0). reduce() waits once.
//   RowSlice  the part of a row that this block takes: whole vectors between 16-byte boundaries, and at most one single element a
//             thread of those before the first and after the last boundary.
#pragma once
#include <liger_kernel/core/cuda/clusters.h>
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/core/cuda/ptx_sm90.cuh>
#include <liger_kernel/core/held_row.h>

namespace liger {
namespace {

constexpr int kMaxRowWarps = kMaxRowThreads / 32;

// What reduce() combines; identity() for lanes that have nothing.
struct AddPairs {
  __device__ __forceinline__ static float2 identity() { return {0.f, 0.f}; }
  __device__ __forceinline__ float2 operator()(float2 a, float2 b) const { return {a.x + b.x, a.y + b.y}; }
};
struct LargestOf {
  __device__ __forceinline__ static float2 identity() { return {-INFINITY, 0.f}; }
  __device__ __forceinline__ float2 operator()(float2 a, float2 b) const { return {fmaxf(a.x, b.x), 0.f}; }
};

template <class Combine>
__device__ __forceinline__ float2 warp_combine(float2 v, Combine combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    v = combine(v, float2{__shfl_xor_sync(~0u, v.x, lanes), __shfl_xor_sync(~0u, v.y, lanes)});
  }
  return v;
}

template <int kCluster>
struct RowInbox {
  float2 entries[2][kCluster * kMaxRowWarps];  // in turn: a block sends into the first again only when all have read it, since it
                                               // needs everyone's message in the second before
  alignas(8) uint64_t arrived[2];              // clusters: count the bytes of each
};

template <int kCluster>
class RowTeam {
 public:
  __device__ explicit RowTeam(RowInbox<kCluster>& inbox) : inbox_(inbox) {
    if constexpr (kCluster > 1) {
      if (threadIdx.x == 0) {
        barrier_init(&inbox.arrived[0], 1);
        barrier_init(&inbox.arrived[1], 1);
        fence_barrier_init();
      }
      __syncthreads();
      cluster_arrive();
    }
  }
  __device__ int rank() const {
    if constexpr (kCluster > 1) return static_cast<int>(cluster_rank());
    return 0;
  }
  __device__ int64_t first_row() const { return int64_t{blockIdx.x / kCluster} * blockDim.y + threadIdx.y; }
  __device__ int64_t row_step() const { return int64_t{gridDim.x / kCluster} * blockDim.y; }

  // Every thread gets the combination over the team; all blocks and warps combine in the same order. In a cluster every warp sends
  // its value to all blocks, whose barriers count the bytes: no cluster barrier after the first.
  template <class Combine>
  __device__ __forceinline__ float2 reduce(float2 v, Combine combine) {
    v = warp_combine(v, combine);
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (kCluster == 1 && warps == 1) return v;
    const int entries = kCluster * warps;
    float2* box = inbox_.entries[turn_ & 1];
    if constexpr (kCluster > 1) {
      uint64_t* barrier = &inbox_.arrived[turn_ & 1];
      if (turn_ == 0) cluster_wait();  // before that, a peer's memory may not be written
      if (threadIdx.x == 0) barrier_expect(barrier, entries * static_cast<int>(sizeof(float2)));
      if (lane < kCluster) {
        store_async(in_peer(shared_address(&box[rank() * warps + warp]), lane), v, in_peer(shared_address(barrier), lane));
      }
      __syncwarp();
      barrier_wait(barrier, (turn_ >> 1) & 1);
    } else {
      if (lane == 0) box[warp] = v;
      __syncthreads();
    }
    ++turn_;
    v = lane < entries ? box[lane] : Combine::identity();
    for (int i = lane + 32; i < entries; i += 32) v = combine(v, box[i]);
    return warp_combine(v, combine);
  }

 private:
  RowInbox<kCluster>& inbox_;
  uint32_t turn_ = 0;
};

// Of what is read again and again: it may stay in the caches.
template <class Access, class T>
__device__ __forceinline__ Access load_again(const T* p) {
  if constexpr (Access::kSize == 1) {
    return {*p};
  } else {
    return Access::load(p);
  }
}

template <class T, class Access>
struct RowSlice {
  static constexpr int kSize = Access::kSize;

  __device__ RowSlice(const T* row, int64_t cols, int64_t length, int rank) {
    const int64_t before = kSize > 1 ? (16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T) : 0;
    const int64_t head = before < cols ? before : cols;
    const int64_t vectors = (cols - head) / kSize, tail = head + vectors * kSize, begin = length * rank;
    first = head + begin * kSize;
    count = vectors < begin ? 0 : vectors - begin < length ? vectors - begin : length;
    single = -1;
    if (kSize > 1 && rank == 0) {
      const int t = threadIdx.x;  // fewer than 8 at each end
      if (t < head) single = t;
      if (t >= 16 && t < 24 && tail + t - 16 < cols) single = tail + t - 16;
    }
  }
  // Column of vector v of the slice.
  __device__ __forceinline__ int64_t at(int64_t v) const { return first + v * kSize; }

  int64_t first, count;  // column of the first vector, vectors
  int64_t single;        // column of this thread's element outside the vectors, or -1
};

// The launch of a kernel of a HeldRowPlan; `kernel` takes (args, vectors of a slice). Clusters are persistent: to start one costs more
// than a row.
template <class Args>
void launch_row(void (*kernel)(Args, int64_t), const Args& a, const HeldRowPlan& p, const Host& host, const char* op) {
  int64_t groups = std::min<int64_t>((a.rows + p.rows_per_block - 1) / p.rows_per_block, 0x7fffffff / kMaxRowCluster);
  if (p.cluster > 1) {
    const auto address = reinterpret_cast<const void*>(kernel);
    groups = std::min<int64_t>(groups, std::max(1, resident_clusters(address, p.cluster, p.threads, 0, host.machine, op)));
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(p.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(groups * p.cluster));
  config.blockDim = dim3(p.threads, p.rows_per_block);
  config.stream = stream_of(host);
  config.attrs = &attribute;
  config.numAttrs = p.cluster > 1 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, a, p.slice), op, "launch");
}

}  // namespace
}  // namespace liger
