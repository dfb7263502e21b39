// The Jensen-Shannon divergence of two rows of logits on Hopper with both rows read once: the blocks of a persistent cluster hold them in
// shared memory, each thread its own vectors, so that no barrier guards them, and a thread that has written its part of the gradient asks
// for its part of the next row. Two exchanges a row: the log-sums, then the sums of the divergence (core/cuda/held_row.cuh).
#include <liger_kernel/core/cuda/async_copy.cuh>
#include <liger_kernel/core/cuda/held_row.cuh>
#include <liger_kernel/core/cuda/packed.cuh>
#include <liger_kernel/ops/fused_linear_jsd/plan.h>

namespace liger::fused_linear_jsd {
namespace {

#include <liger_kernel/ops/jsd/column.inl.h>
#include <liger_kernel/ops/fused_linear_jsd/row.cuh>

// The student's largest logit and its sum of exponentials relative to that, then the teacher's.
template <bool kFast>
struct MergeLogSums {
  float scale;
  __device__ __forceinline__ static float4 identity() { return {-INFINITY, 0.f, -INFINITY, 0.f}; }
  __device__ __forceinline__ float2 merge(float2 a, float2 b) const {
    const float top = fmaxf(a.x, b.x);
    return {top, a.y * Exponential<kFast>::ratio(a.x, top, scale) + b.y * Exponential<kFast>::ratio(b.x, top, scale)};
  }
  __device__ __forceinline__ float4 operator()(float4 a, float4 b) const {
    const float2 student = merge({a.x, a.y}, {b.x, b.y}), teacher = merge({a.z, a.w}, {b.z, b.w});
    return {student.x, student.y, teacher.x, teacher.y};
  }
  __device__ __forceinline__ float4 over_warp(float4 v) const {
    const float2 student = warp_log_sum<kFast>({v.x, v.y}, scale), teacher = warp_log_sum<kFast>({v.z, v.w}, scale);
    return {student.x, student.y, teacher.x, teacher.y};
  }
};
struct AddSums {
  __device__ __forceinline__ static float4 identity() { return {}; }
  __device__ __forceinline__ float4 operator()(float4 a, float4 b) const { return {a.x + b.x, a.y + b.y, 0.f, 0.f}; }
};

template <class T, Kind kKind>
__global__ void __launch_bounds__(kThreads, 2) read_once(DivergenceArgs a, int slice) {
  constexpr int kSize = Vec<T>::kSize;
  constexpr bool kFast = sizeof(T) == 2;
  extern __shared__ __align__(128) uint4 rows_raw[];
  T* const xs = reinterpret_cast<T*>(rows_raw);  // this block's slices of both rows
  T* const ys = xs + int64_t{slice} * kSize;
  __shared__ RowInbox<true, float4, kThreads / 32> inbox;
  RowTeam team(inbox);

  const int vectors = static_cast<int>((a.vocab + kSize - 1) / kSize), begin = team.rank() * slice;
  const int count = std::clamp(vectors - begin, 0, slice);
  const int columns = static_cast<int>(a.vocab - int64_t{begin} * kSize);  // from the slice's first on; not positive for an empty one
  const float share = a.stats ? a.stats->inverse_count : 1.f, scale = 1 / a.loss.temperature;
  const bool hard_apart = a.hard && a.loss.temperature != 1;

  const auto ask_for = [&](int64_t row) {
    const T* x = static_cast<const T*>(a.student) + row * a.student_stride + int64_t{begin} * kSize;
    const T* y = static_cast<const T*>(a.teacher) + row * a.teacher_stride + int64_t{begin} * kSize;
    for (int v = threadIdx.x; v < count; v += kThreads) {
      copy_async(xs + v * kSize, x + v * kSize);
      copy_async(ys + v * kSize, y + v * kSize);
    }
    commit_copies();
  };

  bool asked = false;
  for (int64_t row = team.first_row(); row < a.rows; row += team.row_step()) {
    T* const x = static_cast<T*>(a.student) + row * a.student_stride + int64_t{begin} * kSize;
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
      if (team.rank() == 0 && threadIdx.x == 0) {
        a.soft[row] = label.constant();
        if (a.hard) a.hard[row] = label.constant();
      }
      continue;
    }

    // 2. Both rows; -inf beyond their end.
    if (!asked) ask_for(row);
    const bool next_label = row + team.row_step() < a.rows && !Label(a, row + team.row_step()).skipped;
    wait_copies(0);
    if (count > 0 && count * kSize > columns && (count - 1) % kThreads == threadIdx.x) {
      for (int j = columns; j < count * kSize; ++j) xs[j] = ys[j] = narrow<T>(-INFINITY);
    }

    // 3. Log-sums.
    const auto log_sums = [&](float factor) {
      uint32_t top_x = Word<T>::kLowest, top_y = Word<T>::kLowest;
      for (int v = threadIdx.x; v < count; v += kThreads) {
        top_x = Word<T>::max(top_x, max_word(Vec<T>::load(xs + v * kSize)));
        top_y = Word<T>::max(top_y, max_word(Vec<T>::load(ys + v * kSize)));
      }
      float4 sums{max_value<T>(top_x), 0.f, max_value<T>(top_y), 0.f};
      const Exponential<kFast> of_x(sums.x, factor), of_y(sums.z, factor);
      for (int v = threadIdx.x; v < count; v += kThreads) {
        float s[kSize], t[kSize];
        Vec<T>::load(xs + v * kSize).to_float(s);
        Vec<T>::load(ys + v * kSize).to_float(t);
#pragma unroll
        for (int i = 0; i < kSize; ++i) sums.y += of_x(s[i]), sums.w += of_y(t[i]);
      }
      return team.reduce(sums, MergeLogSums<kFast>{factor});
    };
    const float4 tempered = log_sums(scale), plain = hard_apart ? log_sums(1.f) : tempered;
    const Jsd<kKind, kFast> jsd(a.loss,
                                {{rounded_product(tempered.x, scale), tempered.y}, {rounded_product(tempered.z, scale), tempered.w}, {}});
    const Hard<kFast> hard(a, {plain.x, plain.y}, label.column, share);

    // 4. Sums of the divergence.
    float loss = 0, slope = 0;
    for (int v = threadIdx.x; v < count; v += kThreads) {
      float s[kSize], t[kSize];
      Vec<T>::load(xs + v * kSize).to_float(s);
      Vec<T>::load(ys + v * kSize).to_float(t);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Column<float> c = jsd(s[i], t[i]);
        loss += c.loss, slope += c.slope;
      }
    }
    const float4 total = team.reduce({loss, slope, 0.f, 0.f}, AddSums());

    // 5. Results and gradient, from shared memory.
    if (team.rank() == 0 && threadIdx.x == 0) a.soft[row] = not_negative(total.x);
    const int64_t own = label.column - int64_t{begin} * kSize;  // the label's column in this slice
    if (a.hard && own >= 0 && own < int64_t{count} * kSize && own / kSize % kThreads == threadIdx.x) {
      a.hard[row] = -hard.log_p(widen(xs[own]));
    }
    const JsdDerivative<kKind, kFast> derivative(jsd, total.y, a.loss.soft_scale * share);
    const auto write = [&](auto&& of_hard) {
      for (int v = threadIdx.x; v < count; v += kThreads) {
        float s[kSize], t[kSize];
        Vec<T>::load(xs + v * kSize).to_float(s);
        Vec<T>::load(ys + v * kSize).to_float(t);
#pragma unroll
        for (int i = 0; i < kSize; ++i) s[i] = derivative(s[i], t[i]) + of_hard(s[i], v * kSize + i);
        store(v, s);
      }
    };
    if (a.gradient && a.hard) write([&](float logit, int j) { return hard(logit, int64_t{begin} * kSize + j); });
    if (a.gradient && !a.hard) write([](float, int) { return 0.f; });
    asm volatile("" ::: "memory");  // what was read before the copies is read before them
    asked = next_label;
    if (asked) ask_for(row + team.row_step());
  }
}

template <class T, Kind kKind>
bool launch(const DivergenceArgs& a, const ReadOnce& plan, const Host& host) {
  const auto kernel = read_once<T, kKind>;
  const auto address = reinterpret_cast<const void*>(kernel);
  const int bytes = plan.slice * 32;
  allow_shared(address, host.machine, kReservedShared, kOp);
  const int resident = resident_clusters(address, plan.cluster, kThreads, bytes, host.machine, kOp);
  if (resident < 1) return false;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.cluster * std::min<int64_t>(a.rows, resident)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream_of(host);
  config.attrs = &attribute;
  config.numAttrs = 1;
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
