// A row in the registers of those who work on it, and what they exchange. See core/held_row.h.
//
//   RowTeam   the threads on one row: a warp, a block, or the blocks of a cluster (SM 9.0). reduce() waits once.
//   RowRest   what registers do not hold of it: in shared memory, or read again.
//   RowSlice  the part of a row that this block takes: whole vectors between 16-byte boundaries, and at most one single element a
//             thread of those before the first and after the last boundary.
#pragma once
#include <liger_kernel/core/cuda/async_copy.cuh>
#include <liger_kernel/core/cuda/clusters.h>
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/core/cuda/ptx_sm90.cuh>
#include <liger_kernel/core/held_row.h>

namespace liger {
namespace {

constexpr int kMaxRowWarps = kRestThreads / 32;

// Launch bounds of a kernel with or without a rest.
constexpr int row_threads(bool rest) { return rest ? kRestThreads : kMaxRowThreads; }

// What reduce() combines; identity() for lanes that have nothing. over_warp(v), where there is one, is a faster way to combine a warp.
struct AddPairs {
  __device__ __forceinline__ static float2 identity() { return {0.f, 0.f}; }
  __device__ __forceinline__ float2 operator()(float2 a, float2 b) const { return {a.x + b.x, a.y + b.y}; }
};
struct LargestOf {
  __device__ __forceinline__ static float2 identity() { return {-INFINITY, 0.f}; }
  __device__ __forceinline__ float2 operator()(float2 a, float2 b) const { return {fmaxf(a.x, b.x), 0.f}; }
};

__device__ __forceinline__ float2 of_lane(float2 v, int lanes) {
  return {__shfl_xor_sync(~0u, v.x, lanes), __shfl_xor_sync(~0u, v.y, lanes)};
}
__device__ __forceinline__ float4 of_lane(float4 v, int lanes) {
  const float2 a = of_lane(float2{v.x, v.y}, lanes), b = of_lane(float2{v.z, v.w}, lanes);
  return {a.x, a.y, b.x, b.y};
}
template <class Value, class Combine>
__device__ __forceinline__ Value warp_combine(Value v, Combine combine) {
  if constexpr (requires { combine.over_warp(v); }) {
    return combine.over_warp(v);
  } else {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) v = combine(v, of_lane(v, lanes));
    return v;
  }
}

// V: float2 or float4.
template <bool kTakesClusters, class V = float2, int kWarps = kMaxRowWarps>
struct RowInbox {
  using Value = V;
  static constexpr bool kCluster = kTakesClusters;
  V entries[2][(kCluster ? kMaxRowCluster : 1) * kWarps];  // in turn: a block sends into the first again only when all have read it,
                                                           // since it needs everyone's message in the second before
  alignas(8) uint64_t arrived[2];                          // clusters: count the bytes of each
};

template <class Inbox>
class RowTeam {
  static constexpr bool kCluster = Inbox::kCluster;
  using Value = typename Inbox::Value;

 public:
  __device__ explicit RowTeam(Inbox& inbox) : inbox_(inbox), blocks_(kCluster ? cluster_blocks() : 1) {
    if (kCluster && blocks_ > 1) {
      if (threadIdx.x == 0) {
        barrier_init(&inbox.arrived[0], 1);
        barrier_init(&inbox.arrived[1], 1);
        fence_barrier_init();
      }
      __syncthreads();
      cluster_arrive();
    }
  }
  __device__ int rank() const { return kCluster && blocks_ > 1 ? static_cast<int>(cluster_rank()) : 0; }
  __device__ int64_t first_row() const { return int64_t{blockIdx.x / blocks_} * blockDim.y + threadIdx.y; }
  __device__ int64_t row_step() const { return int64_t{gridDim.x / blocks_} * blockDim.y; }

  // Every thread gets the combination over the team; all blocks and warps combine in the same order. In a cluster every warp sends
  // its value to all blocks, whose barriers count the bytes: no cluster barrier after the first.
  template <class Combine>
  __device__ __forceinline__ Value reduce(Value v, Combine combine) {
    v = warp_combine(v, combine);
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (blocks_ == 1 && warps == 1) return v;
    const int entries = blocks_ * warps;
    Value* box = inbox_.entries[turn_ & 1];
    if (kCluster && blocks_ > 1) {
      uint64_t* barrier = &inbox_.arrived[turn_ & 1];
      if (turn_ == 0) cluster_wait();  // before that, a peer's memory may not be written
      if (threadIdx.x == 0) barrier_expect(barrier, entries * static_cast<int>(sizeof(Value)));
      if (lane < blocks_) {
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
  Inbox& inbox_;
  const int blocks_;
  uint32_t turn_ = 0;
};

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

// Vectors of a slice beyond the `held` ones that threads keep in registers, of one operand. The first `shared` of them are copied to
// shared memory, each by the thread that reads it, so that no barrier is needed; those after them are read again.
template <class T, class Access>
struct RowRest {
  // f(v) for this thread's vectors of the rest
  template <class F>
  __device__ __forceinline__ void for_each(int64_t count, F&& f) const {
#pragma unroll 2
    for (int64_t v = held + threadIdx.x; v < count; v += blockDim.x) f(v);
  }
  // To be waited for with commit_copies(), wait_copies(0).
  __device__ __forceinline__ void ask(const RowSlice<T, Access>& slice) const {
    if constexpr (Access::kSize > 1) {
      const int64_t end = held + shared < slice.count ? held + shared : slice.count;
      for (int64_t v = held + threadIdx.x; v < end; v += blockDim.x) copy_async(memory + (v - held), row + slice.at(v));
    }
  }
  __device__ __forceinline__ Access operator()(const RowSlice<T, Access>& slice, int64_t v) const {
    if constexpr (Access::kSize == 1) {
      return {row[slice.at(v)]};
    } else {
      return v < held + shared ? Access{memory[v - held]} : Access::load(row + slice.at(v));
    }
  }
  const T* row;
  uint4* memory;
  int64_t held;
  int shared;
};

// How a block's slice is cut.
struct RowCut {
  int64_t length;  // vectors of a slice
  int shared;      // of each operand
};

// The launch of a kernel of a HeldRowPlan. Clusters are persistent: to start one costs more than a row.
template <class Args>
void launch_row(void (*kernel)(Args, RowCut), const Args& a, const HeldRowPlan& p, const Host& host, const char* op) {
  int64_t groups = std::min<int64_t>((a.rows + p.rows_per_block - 1) / p.rows_per_block, 0x7fffffff / kMaxRowCluster);
  const auto address = reinterpret_cast<const void*>(kernel);
  if (p.shared > 0) allow_shared(address, host.machine, kRowOwnMemory, op);
  if (p.persistent) {
    groups = std::min<int64_t>(groups, std::max(1, resident_clusters(address, p.cluster, p.threads, p.shared_bytes, host.machine, op)));
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(p.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(groups * p.cluster));
  config.blockDim = dim3(p.threads, p.rows_per_block);
  config.dynamicSmemBytes = p.shared_bytes;
  config.stream = stream_of(host);
  config.attrs = &attribute;
  config.numAttrs = p.cluster > 1 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, a, RowCut{p.slice, p.shared}), op, "launch");
}

}  // namespace
}  // namespace liger
