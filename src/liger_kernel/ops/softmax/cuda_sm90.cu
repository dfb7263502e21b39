// Softmax on Hopper: rows too long for the registers of one block, or too few to fill the machine, with the blocks of a persistent cluster
// on a row. They lie in shared memory, each vector in a place of the thread that works on it, so that no barrier guards them; the next row
// is on its way while one is worked on (two stages), or as soon as one has been written (one stage). Rows too long even for that: part in
// registers, part in shared memory (kernels.cuh).
#include <liger_kernel/ops/softmax/kernels.cuh>

namespace liger::softmax {
namespace {

template <class T, int kStages>
__global__ void __launch_bounds__(staged_threads(kStages), kStages == 2 ? 1 : 2) forward_staged(ForwardArgs a, int64_t length) {
  using Exp = Exponential<sizeof(T) == 2>;
  using Access = Vec<T>;
  constexpr int kSize = Access::kSize, kThreads = staged_threads(kStages);
  extern __shared__ uint4 memory[];
  __shared__ RowInbox<true, float2, kThreads / 32> inbox;
  RowTeam team(inbox);
  const auto input = [&](int64_t row) { return static_cast<const T*>(a.x) + row * a.x_stride; };
  const auto ask = [&](int64_t row, int stage) {
    if (row < a.rows) {
      const RowSlice<T, Access> slice(input(row), a.cols, length, team.rank());
      for (int v = threadIdx.x; v < slice.count; v += kThreads) copy_async(memory + stage * length + v, input(row) + slice.at(v));
    }
    commit_copies();
  };
  const auto give_way = [&](int64_t next) {
    asm volatile("" ::: "memory");  // what was read before the copies is read before them
    ask(next, 0);
  };
  int stage = 0;
  ask(team.first_row(), stage);
  for (int64_t row = team.first_row(); row < a.rows; row += team.row_step(), stage ^= kStages - 1) {
    const T* x = input(row);
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    const RowSlice<T, Access> slice(x, a.cols, length, team.rank());
    const uint4* held = memory + stage * length;
    const float single = slice.single >= 0 ? widen(x[slice.single]) : -INFINITY;
    if (kStages == 2) ask(row + team.row_step(), stage ^ 1);
    wait_copies(kStages - 1);

    // 1. The sums.
    float2 sums{single, 0.f};
    for (int v = threadIdx.x; v < slice.count; v += kThreads) sums.x = fmaxf(sums.x, largest_of(Access{held[v]}));
    const Exp e(sums.x);
    sums.y = e(single);
    for (int v = threadIdx.x; v < slice.count; v += kThreads) {
      float values[kSize], s0 = 0, s1 = 0;
      Access{held[v]}.to_float(values);
#pragma unroll
      for (int k = 0; k < kSize; k += 2) s0 += e(values[k]), s1 += e(values[k + 1]);
      sums.y += s0 + s1;
    }
    sums = team.reduce(sums, MergeSums<T>());

    // 2. Write.
    const Normalized<T> result(sums);
    for (int v = threadIdx.x; v < slice.count; v += kThreads) {
      float values[kSize];
      Access{held[v]}.to_float(values);
#pragma unroll
      for (int k = 0; k < kSize; ++k) values[k] = result(values[k]);
      Access::from_float(values).store(y + slice.at(v));
    }
    if (slice.single >= 0) y[slice.single] = narrow<T>(result(single));
    if (kStages == 1) give_way(row + team.row_step());
  }
}

template <class T, int kStages>
__global__ void __launch_bounds__(staged_threads(kStages), kStages == 2 ? 1 : 2) backward_staged(BackwardArgs a, int64_t length) {
  using Access = Vec<T>;
  constexpr int kSize = Access::kSize, kThreads = staged_threads(kStages);
  extern __shared__ uint4 memory[];
  __shared__ RowInbox<true, float2, kThreads / 32> inbox;
  RowTeam team(inbox);
  const auto input = [&](int64_t row) { return static_cast<const T*>(a.dy) + row * a.dy_stride; };
  const auto output = [&](int64_t row) { return static_cast<const T*>(a.y) + row * a.y_stride; };
  const auto ask = [&](int64_t row, int stage) {
    if (row < a.rows) {
      const RowSlice<T, Access> slice(input(row), a.cols, length, team.rank());
      uint4* to = memory + 2 * stage * length;
      for (int v = threadIdx.x; v < slice.count; v += kThreads) {
        copy_async(to + v, input(row) + slice.at(v));
        copy_async(to + length + v, output(row) + slice.at(v));
      }
    }
    commit_copies();
  };
  const auto give_way = [&](int64_t next) {
    asm volatile("" ::: "memory");  // what was read before the copies is read before them
    ask(next, 0);
  };
  int stage = 0;
  ask(team.first_row(), stage);
  for (int64_t row = team.first_row(); row < a.rows; row += team.row_step(), stage ^= kStages - 1) {
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
    const RowSlice<T, Access> slice(input(row), a.cols, length, team.rank());
    const uint4 *held_dy = memory + 2 * stage * length, *held_y = held_dy + length;
    const float single_dy = slice.single >= 0 ? widen(input(row)[slice.single]) : 0.f;
    const float single_y = slice.single >= 0 ? widen(output(row)[slice.single]) : 0.f;
    if (kStages == 2) ask(row + team.row_step(), stage ^ 1);
    wait_copies(kStages - 1);

    // 1. The sum of dy y.
    float sum = single_dy * single_y;
    for (int v = threadIdx.x; v < slice.count; v += kThreads) {
      float g[kSize], p[kSize], s0 = 0, s1 = 0;
      Access{held_dy[v]}.to_float(g), Access{held_y[v]}.to_float(p);
#pragma unroll
      for (int k = 0; k < kSize; k += 2) s0 = fmaf(g[k], p[k], s0), s1 = fmaf(g[k + 1], p[k + 1], s1);
      sum += s0 + s1;
    }
    sum = team.reduce({sum, 0.f}, AddPairs()).x;

    // 2. Write.
    for (int v = threadIdx.x; v < slice.count; v += kThreads) {
      float g[kSize], p[kSize];
      Access{held_dy[v]}.to_float(g), Access{held_y[v]}.to_float(p);
#pragma unroll
      for (int k = 0; k < kSize; ++k) p[k] *= g[k] - sum;
      Access::from_float(p).store(dx + slice.at(v));
    }
    if (slice.single >= 0) dx[slice.single] = narrow<T>(single_y * (single_dy - sum));
    if (kStages == 1) give_way(row + team.row_step());
  }
}

template <class Args>
void launch(void (*kernel)(Args, int64_t), const Args& a, const StagedPlan& p, const Host& host) {
  const auto address = reinterpret_cast<const void*>(kernel);
  allow_shared(address, host.machine, kStagedOwnMemory, "softmax");
  const int64_t resident = std::max(1, resident_clusters(address, p.cluster, p.threads, p.bytes, host.machine, "softmax"));
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(p.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(a.rows, resident) * p.cluster));
  config.blockDim = dim3(p.threads);
  config.dynamicSmemBytes = p.bytes;
  config.stream = stream_of(host);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, a, p.slice), "softmax", "launch");
}

}  // namespace

void forward_cuda_cluster(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    if (const StagedPlan p = choose_staged(a, host.machine); p.cluster > 0)
      return launch(p.stages == 2 ? forward_staged<T, 2> : forward_staged<T, 1>, a, p, host);
    const HeldRowPlan p = choose_row(vectors_of(a.cols, a.dtype), 1, kMaxRowCluster, host.machine.shared_memory);
    launch_row(forward_kernel<T, Vec<T>, most_held(1, true), true, true>, a, p, host, "softmax");
  });
}

void backward_cuda_cluster(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    if (const StagedPlan p = choose_staged(a, host.machine); p.cluster > 0)
      return launch(p.stages == 2 ? backward_staged<T, 2> : backward_staged<T, 1>, a, p, host);
    const HeldRowPlan p = choose_row(vectors_of(a.cols, a.dtype), 2, kMaxRowCluster, host.machine.shared_memory);
    launch_row(backward_kernel<T, Vec<T>, most_held(2, true), true, true>, a, p, host, "softmax");
  });
}

}  // namespace liger::softmax
