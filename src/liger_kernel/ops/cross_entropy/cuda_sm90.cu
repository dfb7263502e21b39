// Cross entropy on Hopper with the row read once: the blocks of a cluster hold it, as raw 16-byte vectors in registers and, for
// the longest rows, in shared memory, until the sums are known; then the gradient is written from there.
//
// * One exchange a row and no cluster barrier after the start: every warp sends its (largest, sum of exponentials, sum) to all
//   blocks by asynchronous store onto their barrier, into one of two inboxes in turn. A block can be at most one row ahead of a
//   peer, since it needs the messages of all the peer's warps, so two inboxes suffice.
// * The target's column is left out of the sums and its x sent beside them, by the thread that holds it: nobody reads it from
//   memory, where its own gradient may already stand.
// * The part in shared memory comes by bulk copy, asked for one row ahead.
// * Rows of any alignment: the vectors are a row's aligned middle; each of the few elements before and after it has a thread.
#include <utility>

#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/clusters.h>
#include <liger_kernel/core/cuda/overlap.cuh>
#include <liger_kernel/ops/cross_entropy/plan.h>
#include <liger_kernel/core/cuda/ptx_sm90.cuh>
#include <liger_kernel/ops/cross_entropy/row_sm90.cuh>

namespace liger::cross_entropy {
namespace {

#include <liger_kernel/ops/cross_entropy/finish.inl.h>

template <class T, int kLayout, bool kAligned>
__global__ void __launch_bounds__(kLayouts[kLayout].threads, kLayouts[kLayout].blocks) read_once(ForwardArgs a, int slice) {
  constexpr int kSize = Vec<T>::kSize, kCluster = kLayouts[kLayout].cluster, kThreads = kLayouts[kLayout].threads;
  constexpr int kVectors = kLayouts[kLayout].vectors, kHeld = kThreads * kVectors;
  constexpr bool kShared = kLayouts[kLayout].shared;
  constexpr int kWarps = kThreads / 32, kEntries = kCluster * kWarps;
  extern __shared__ __align__(128) uint4 rest_raw[];
  Vec<T>* rest = reinterpret_cast<Vec<T>*>(rest_raw);      // this slice beyond the registers
  __shared__ __align__(16) float4 inbox[2][kEntries + 1];  // per warp: largest, others, sum of x; last the target's x
  __shared__ __align__(8) uint64_t arrived[2], loaded;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = kCluster > 1 ? static_cast<int>(cluster_rank()) : 0, begin = rank * slice;
  const int64_t groups = gridDim.x / kCluster;
  const bool smooth = a.label_smoothing > 0;
  const auto valid = [&](int64_t y) { return y != a.ignore_index && y >= 0 && y < a.vocab; };
  const auto store = [](const float(&values)[kSize], T* p) {
    if constexpr (kAligned) {
      Vec<T>::from_float(values).assign(p);
    } else {
      Vec<T>::from_float(values).store(p);
    }
  };
  const auto logits_of = [&](int64_t row) { return static_cast<const T*>(a.logits) + row * a.logits_stride; };

  if (kCluster > 1 || kShared) {
    if (threadIdx.x == 0) {
      barrier_init(&arrived[0], 1);
      barrier_init(&arrived[1], 1);
      barrier_init(&loaded, 1);
      fence_barrier_init();
    }
    __syncthreads();
    if (kCluster > 1) cluster_arrive();
  }
  bool peers_ready = kCluster == 1;
  wait_for_previous_kernel();
  const LabelStats stats = *a.stats;

  // One thread asks for the shared part of the next row that has a target.
  int64_t ahead = blockIdx.x / kCluster;
  const auto prefetch = [&] {
    while (ahead < a.rows && !valid(a.target[ahead * a.target_stride])) ahead += groups;
    if (ahead >= a.rows) return;
    const T* logits = logits_of(ahead);
    const RowColumns<T, kAligned> c(logits, a.vocab);
    const int end = min(begin + slice, c.vectors), from = begin + kHeld;
    const int bytes = end > from ? (end - from) * 16 : 0;
    barrier_expect(&loaded, bytes);
    if (bytes > 0) bulk_load(rest, logits + c.head + int64_t{from} * kSize, bytes, &loaded);
    ahead += groups;
  };
  if (kShared && threadIdx.x == 0) prefetch();

  // Targets are read a row ahead: nothing of a row can be loaded before its target is known.
  const auto target_of = [&](int64_t row) { return row < a.rows ? a.target[row * a.target_stride] : a.ignore_index; };
  int64_t next = target_of(blockIdx.x / kCluster);
  int turn = 0;  // rows exchanged
  for (int64_t row = blockIdx.x / kCluster; row < a.rows; row += groups) {
    const int64_t y = next;
    next = target_of(row + groups);
    const T* logits = logits_of(row);
    T* grad = a.grad ? static_cast<T*>(a.grad) + row * a.grad_stride : nullptr;
    const RowColumns<T, kAligned> columns(logits, a.vocab);
    const T* body = logits + columns.head + int64_t{begin} * kSize;  // of this slice
    T* grad_body = grad + columns.head + int64_t{begin} * kSize;
    const int count = max(0, min(slice, columns.vectors - begin));
    const int single = columns.single(rank == 0, rank == kCluster - 1);

    // 1. Rows without a valid target: constants.
    if (!valid(y)) {
      const float value = y == a.ignore_index ? 0.f : NAN;
      float values[kSize];
#pragma unroll
      for (int k = 0; k < kSize; ++k) values[k] = value;
      for (int v = threadIdx.x; grad && v < count; v += kThreads) store(values, grad_body + v * kSize);
      if (grad && single >= 0) grad[single] = narrow<T>(value);
      if (rank == 0 && threadIdx.x == 0) {
        a.loss[row] = value;
        if (a.z_loss) a.z_loss[row] = value;
      }
      continue;
    }

    // 2. Load.
    Vec<T> held[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = threadIdx.x + i * kThreads;
      held[i] = v < count ? Vec<T>::load(body + v * kSize) : lowest<T>();
    }
    float single_x = single >= 0 ? widen(logits[single]) : -INFINITY;
    const int64_t relative = y - columns.head - int64_t{begin} * kSize;  // the target in this slice
    const int target_vector = relative >= 0 && relative < int64_t{count} * kSize ? static_cast<int>(relative / kSize) : -1;
    const int target_element = static_cast<int>(relative % kSize);
    const bool own = target_vector >= 0 ? target_vector % kThreads == static_cast<int>(threadIdx.x) : single == y;
    float largest = -INFINITY, others = 0, weighted = 0, own_x = 0;

    // 3. Sums over the part in shared memory, two vectors at a time.
    if constexpr (kShared) {
      barrier_wait(&loaded, turn & 1);
      const auto fetch = [&](int v) {  // v of the slice
        if (v >= count) return lowest<T>();
        Vec<T> x = rest[v - kHeld];
        if (smooth) weighted += sum_values(x);
        if (v == target_vector) {
          own_x = take(x, target_element);
          rest[v - kHeld] = x;
          fence_before_bulk();
        }
        return x;
      };
      for (int v = kHeld + threadIdx.x; v < count; v += 2 * kThreads) {
        const Vec<T> p = fetch(v), q = fetch(v + kThreads);
        const float m = fmaxf(largest, max_value<T>(Word<T>::max(max_word(p), max_word(q))));
        const RowExponential<T> e(m);
        others = others * ratio_fast(largest, m) + (e.sum(p) + e.sum(q));
        largest = m;
      }
    }

    // 4. Sums over the registers.
    if (smooth) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int v = threadIdx.x + i * kThreads;
        if (v < count) weighted += sum_values(held[i]);
      }
      if (single >= 0) weighted += single_x;
    }
    if (!kAligned && single == y) {
      own_x = single_x;
      single_x = -INFINITY;
    }
    if (own && target_vector >= 0 && target_vector < kHeld) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (target_vector == static_cast<int>(threadIdx.x) + i * kThreads) own_x = take(held[i], target_element);
      }
    }
    {
      uint32_t word = max_word(held[0]);
#pragma unroll
      for (int i = 1; i < kVectors; ++i) word = Word<T>::max(word, max_word(held[i]));
      const float m = kAligned ? max_value<T>(word) : fmaxf(max_value<T>(word), single_x);
      const RowExponential<T> e(m);
      float sum = kAligned ? 0.f : e(single_x);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) sum += e.sum(held[i]);
      const float both = fmaxf(largest, m), whole = warp_largest(both);
      others = others * ratio_fast(largest, whole) + sum * ratio_fast(m, whole);
      largest = whole;
      others = warp_sum(others);
      if (smooth) weighted = warp_sum(weighted);
    }

    // 5. Exchange.
    float4* box = inbox[turn & 1];
    if constexpr (kCluster > 1) {
      if (!peers_ready) {
        cluster_wait();
        peers_ready = true;
      }
      uint64_t* barrier = &arrived[turn & 1];
      if (threadIdx.x == 0) barrier_expect(barrier, (kEntries + 1) * 16);
      if (lane < kCluster) {
        store_async(in_peer(shared_address(&box[rank * kWarps + warp]), lane), make_float4(largest, others, weighted, 0.f),
                    in_peer(shared_address(barrier), lane));
      }
      if (own) {
#pragma unroll 1
        for (int peer = 0; peer < kCluster; ++peer) {
          store_async(in_peer(shared_address(&box[kEntries]), peer), make_float4(own_x, 0.f, 0.f, 0.f),
                      in_peer(shared_address(barrier), peer));
        }
      }
      __syncwarp();
      barrier_wait(barrier, (turn >> 1) & 1);
    } else {
      if (lane == 0) box[warp] = make_float4(largest, others, weighted, 0.f);
      if (own) box[kEntries].x = own_x;
      __syncthreads();
    }
    turn++;

    // 6. The row's sums, by every warp for itself.
    RowSums sums{.target = box[kEntries].x};
    {
      constexpr int kPerLane = (kEntries + 31) / 32;
      float4 entry[kPerLane];
      float m = -INFINITY;
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) {
        const int i = lane + 32 * k;
        entry[k] = i < kEntries ? box[i] : make_float4(-INFINITY, 0.f, 0.f, 0.f);
        m = fmaxf(m, entry[k].x);
      }
      sums.largest = fmaxf(warp_largest(m), sums.target);
      float total = 0, x = 0;
#pragma unroll
      for (int k = 0; k < kPerLane; ++k) total += entry[k].y * ratio_fast(entry[k].x, sums.largest), x += entry[k].z;
      sums.others = warp_sum(total);
      if (smooth) sums.weighted = warp_sum(x);
    }

    // 7. Results and gradient. A thread writes what it read, so grad may be the logits; the target's comes last.
    const Row<sizeof(T) == 2> result(a, stats, row, y, sums);
    if (own) {
      a.loss[row] = result.loss();
      if (a.z_loss) a.z_loss[row] = result.z_loss();
    }
    const RowGradient g = result.gradient();
    const RowExponential<T> e(g.top);
    const auto write = [&](int v, const Vec<T>& x) {
      float values[kSize];
      x.to_float(values);
#pragma unroll
      for (int k = 0; k < kSize; ++k) values[k] = fmaf(e(values[k]), g.scale, -g.shift);
      store(values, grad_body + v * kSize);
    };
    if constexpr (kShared) {
      for (int v = kHeld + threadIdx.x; grad && v < count; v += kThreads) write(v, rest[v - kHeld]);
      __syncthreads();
      if (threadIdx.x == 0) {
        fence_before_bulk();
        prefetch();
      }
    }
    if (!grad) continue;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = threadIdx.x + i * kThreads;
      if (v < count) write(v, held[i]);
    }
    if (!kAligned && single >= 0) grad[single] = narrow<T>(fmaf(e(single_x), g.scale, -g.shift));
    if (own) grad[y] = narrow<T>(result.own());
  }
  if (!peers_ready) cluster_wait();
}

template <class T, int kLayout, bool kAligned>
bool launch(const ForwardArgs& a, const ReadOnce& plan, const Host& host) {
  constexpr Layout kThis = kLayouts[kLayout];
  const auto kernel = read_once<T, kLayout, kAligned>;
  const auto address = reinterpret_cast<const void*>(kernel);
  if (kThis.shared) allow_shared(address, host.machine, kReservedShared, "cross_entropy");
  const int resident = resident_clusters(address, kThis.cluster, kThis.threads, plan.shared_bytes, host.machine, "cross_entropy");
  if (resident < 1) return false;
  const int64_t most = kThis.persistent ? resident : 0x7fffffff / kThis.cluster;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(kThis.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(kThis.cluster * (a.rows < most ? a.rows : most)));
  config.blockDim = dim3(kThis.threads);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream_of(host);
  config.attrs = attributes;
  config.numAttrs = kThis.cluster > 1 ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, a, plan.slice), "cross_entropy", "launch");
  return true;
}

template <class T, bool kAligned>
bool launch_layout(const ForwardArgs& a, const ReadOnce& plan, const Host& host) {
  bool done = false;
  [&]<int... kLayout>(std::integer_sequence<int, kLayout...>) {
    ((plan.layout == kLayout ? void(done = launch<T, kLayout, kAligned>(a, plan, host)) : void()), ...);
  }
  (std::make_integer_sequence<int, kLayoutCount>());
  return done;
}

}  // namespace

void forward_cuda_read_once(const ForwardArgs& a, const Host& host) {
  const ReadOnce plan = choose_read_once(a, host.machine.shared_memory);
  const bool done = visit(a.dtype, [&]<class T>(Type<T>) {
    return plan.aligned ? launch_layout<T, true>(a, plan, host) : launch_layout<T, false>(a, plan, host);
  });
  if (!done) forward_cuda_two_pass(a, host);  // a partitioned device may have room for no cluster
}

}  // namespace liger::cross_entropy
