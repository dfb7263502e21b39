// The Jensen-Shannon divergence of two rows of logits on Hopper with both rows read once: the blocks of a cluster hold them in shared
// memory, each thread its own vectors, so that no barrier guards them. Two exchanges a row: the log-sums, then the sums of the divergence.
// In each, a warp writes its part to its block's shared memory, the cluster meets, and every warp reads the parts of all. The second
// meeting of a row parts its log-sums from the next row's, the first meeting of the next row parts the sums.
#include <cooperative_groups.h>

#include <liger_kernel/core/cuda/async_copy.cuh>
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/vec.cuh>
#include <liger_kernel/ops/fused_linear_jsd/plan.h>

namespace liger::fused_linear_jsd {
namespace {

#include <liger_kernel/ops/jsd/column.inl.h>
#include <liger_kernel/ops/fused_linear_jsd/row.cuh>

namespace cg = cooperative_groups;

constexpr int kWarps = kThreads / 32;

// What this lane merges of the parts of all warps of the cluster; the order is fixed.
template <class Value, class Merge>
__device__ __forceinline__ Value of_cluster(const cg::cluster_group& cluster, Value* mine, Value total, Merge&& merge_into) {
  const int lane = threadIdx.x % 32, parts = static_cast<int>(cluster.num_blocks()) * kWarps;
  for (int i = lane; i < parts; i += 32) merge_into(total, cluster.map_shared_rank(mine, i / kWarps)[i % kWarps]);
  return total;
}

template <class T, Kind kKind>
__global__ void __launch_bounds__(kThreads, 2) read_once(DivergenceArgs a, int slice) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr bool kFast = sizeof(T) == 2;
  extern __shared__ __align__(128) uint4 rows_raw[];
  T* const xs = reinterpret_cast<T*>(rows_raw);  // this block's slices of both rows
  T* const ys = xs + int64_t{slice} * kSize;
  __shared__ Share shares[kWarps];
  __shared__ float2 sums[kWarps];

  const cg::cluster_group cluster = cg::this_cluster();
  const int blocks = static_cast<int>(cluster.num_blocks()), rank = static_cast<int>(cluster.block_rank());
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int vectors = static_cast<int>((a.vocab + kSize - 1) / kSize), begin = rank * slice;
  const int count = max(0, min(slice, vectors - begin));
  const float share = a.stats ? a.stats->inverse_count : 1.f, scale = 1 / a.loss.temperature;
  const bool hard_apart = a.hard && a.loss.temperature != 1;

  for (int64_t row = blockIdx.x / blocks; row < a.rows; row += gridDim.x / blocks) {
    T* const x = static_cast<T*>(a.student) + row * a.student_stride + int64_t{begin} * kSize;
    const T* const y = static_cast<const T*>(a.teacher) + row * a.teacher_stride + int64_t{begin} * kSize;
    const int columns = static_cast<int>(a.vocab - int64_t{begin} * kSize);  // from the slice's first on; not positive for an empty one
    const auto store = [&](int v, const float(&d)[kSize]) {
      if ((v + 1) * kSize <= columns) {
        Vec<T>::from_float(d).store(x + v * kSize);
      } else {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (v * kSize + i < columns) x[v * kSize + i] = narrow<T>(d[i]);
        }
      }
    };

    // 1. Rows without a valid label: constants. The whole cluster turns here.
    const Label label(a, row);
    if (label.skipped) {
      float d[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) d[i] = label.constant();
      for (int v = threadIdx.x; a.gradient && v < count; v += kThreads) store(v, d);
      if (rank == 0 && threadIdx.x == 0) {
        a.soft[row] = label.constant();
        if (a.hard) a.hard[row] = label.constant();
      }
      continue;
    }

    // 2. Load.
    for (int v = threadIdx.x; v < count; v += kThreads) {
      copy_async(xs + v * kSize, x + v * kSize);
      copy_async(ys + v * kSize, y + v * kSize);
    }
    commit_copies();
    wait_copies(0);
    // Logits; -inf beyond the row's end.
    const auto fetch = [&](int v, float(&s)[kSize], float(&t)[kSize]) {
      Vec<T>::load(xs + v * kSize).to_float(s);
      Vec<T>::load(ys + v * kSize).to_float(t);
      if ((v + 1) * kSize > columns) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (v * kSize + i >= columns) s[i] = t[i] = -INFINITY;
        }
      }
    };

    // 3. Log-sums.
    Share part = no_share();
    for (int v = threadIdx.x; v < count; v += kThreads) {
      float s[kSize], t[kSize];
      fetch(v, s, t);
      if (hard_apart) add<kFast>(part.hard, s);
#pragma unroll
      for (int i = 0; i < kSize; ++i) s[i] *= scale, t[i] *= scale;
      add<kFast>(part.student, s);
      add<kFast>(part.teacher, t);
    }
    part = warp_merge(part);
    if (lane == 0) shares[warp] = part;
    cluster.sync();
    part = warp_merge(of_cluster(cluster, shares, no_share(), [](Share& all, const Share& one) { merge(all, one); }));
    const Jsd<kKind, kFast> jsd(a.loss, part);
    const Hard<kFast> hard(a, hard_apart ? part.hard : part.student, label.column, share);

    // 4. Sums of the divergence.
    float loss = 0, slope = 0;
    for (int v = threadIdx.x; v < count; v += kThreads) {
      float s[kSize], t[kSize];
      fetch(v, s, t);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Column<float> c = jsd(s[i] * scale, t[i] * scale);
        loss += c.loss, slope += c.slope;
      }
    }
    loss = warp_sum(loss), slope = warp_sum(slope);
    if (lane == 0) sums[warp] = make_float2(loss, slope);
    cluster.sync();
    const float2 total =
        of_cluster(cluster, sums, make_float2(0.f, 0.f), [](float2& all, const float2& one) { all.x += one.x, all.y += one.y; });
    loss = warp_sum(total.x), slope = warp_sum(total.y);

    // 5. Results and gradient, from shared memory: a thread overwrites what it has read itself.
    if (rank == 0 && threadIdx.x == 0) a.soft[row] = not_negative(loss);
    const float soft_scale = a.loss.soft_scale * share;
    const int64_t own = label.column - int64_t{begin} * kSize;  // the label's column in this slice
    if (a.hard && own >= 0 && own < int64_t{count} * kSize && own / kSize % kThreads == threadIdx.x) {
      a.hard[row] = -hard.log_p(widen(xs[own]));
    }
    for (int v = threadIdx.x; a.gradient && v < count; v += kThreads) {
      float s[kSize], t[kSize];
      fetch(v, s, t);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        s[i] = jsd.derivative(s[i] * scale, t[i] * scale, slope) * soft_scale + hard(s[i], int64_t{begin + v} * kSize + i);
      }
      store(v, s);
    }
    __syncthreads();  // orders the reads of these rows before the copies of the next
  }
  cluster.sync();  // peers may still be reading this block's parts
}

template <class T, Kind kKind>
bool launch(const DivergenceArgs& a, const ReadOnce& plan, const Host& host) {
  const auto kernel = read_once<T, kKind>;
  const int bytes = plan.slice * 32;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), kOp, "asking for shared memory");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  const int64_t most = 0x7fffffff / plan.cluster;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.cluster * (a.rows < most ? a.rows : most)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream_of(host);
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), kOp, "occupancy");
  if (clusters < 1) return false;
  check_cuda(cudaLaunchKernelEx(&config, kernel, a, plan.slice), kOp, "launch");
  return true;
}

}  // namespace

void divergence_cuda_read_once(const DivergenceArgs& a, const Host& host) {
  const ReadOnce plan = choose_read_once(a, host.machine);
  bool done = false;
  visit(a.dtype,
        [&]<class T>(Type<T>) { visit_kind(kind_of(a.loss.beta), [&]<Kind kKind>() { done = launch<T, kKind>(a, plan, host); }); });
  if (!done) divergence_cuda_passes(a, host);  // a partitioned device may have room for no cluster
}

}  // namespace liger::fused_linear_jsd
