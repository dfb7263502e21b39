// The divergence of two rows of logits on CUDA for any divergence, width, type and alignment; one block a row. The rows are read for the
// log-sums, for the sums of the divergence, and for the gradient: after the first time from L2 where they fit. Vectors of 16 bytes where
// both rows begin on such boundaries. Each element of the gradient is written by the thread that reads it there.
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/core/cuda/packed.cuh>
#include <liger_kernel/ops/fused_linear_jsd/plan.h>

namespace liger::fused_linear_jsd {
namespace {

#include <liger_kernel/ops/jsd/column.inl.h>
#include <liger_kernel/ops/fused_linear_jsd/row.cuh>

constexpr int kWarps = kThreads / 32;

// Partial sums of a row. The barriers between the passes of a row, three of them, also part one row's use from the next's.
struct Scratchpad {
  Share shares[kWarps];
  float sums[3][kWarps];
};

// Every thread gets the block's share.
__device__ __forceinline__ Share block_merge(Share s, Scratchpad& pad) {
  s = warp_merge(s);
  if (threadIdx.x % 32 == 0) pad.shares[threadIdx.x / 32] = s;
  __syncthreads();
  s = pad.shares[0];
  for (int w = 1; w < blockDim.x / 32; ++w) merge(s, pad.shares[w]);
  return s;
}
template <int kCount>
__device__ __forceinline__ void block_sums(float (&v)[kCount], Scratchpad& pad) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = warp_sum(v[i]);
    if (threadIdx.x % 32 == 0) pad.sums[i][threadIdx.x / 32] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) v[i] += pad.sums[i][w];
  }
}

// Two rows of `count` columns.
template <class T, class U>
struct Pair {
  static constexpr int kSize = Vec<T>::kSize;
  __device__ __forceinline__ Pair(T* x, const U* y, int64_t count) : x(x), y(y), count(count), vectors(0) {
    if constexpr (std::is_same_v<T, U>) {
      if (reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0) vectors = count / kSize;
    }
  }
  // body(x, y, first column), both arrays of as many floats
  template <class Body>
  __device__ __forceinline__ void read(Body&& body) const {
    if constexpr (std::is_same_v<T, U>) {
#pragma unroll 2
      for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
        float a[kSize], b[kSize];
        Vec<T>::load(x + v * kSize).to_float(a);
        Vec<T>::load(y + v * kSize).to_float(b);
        body(a, b, v * kSize);
      }
    }
    for (int64_t j = vectors * kSize + threadIdx.x; j < count; j += blockDim.x) {
      float a[1] = {widen(x[j])}, b[1] = {widen(y[j])};
      body(a, b, j);
    }
  }
  // x becomes derive(x, y, column)
  template <class Derive>
  __device__ __forceinline__ void write(Derive&& derive) const {
    if constexpr (std::is_same_v<T, U>) {
      for (int64_t v = threadIdx.x; v < vectors; v += blockDim.x) {
        float a[kSize], b[kSize];
        Vec<T>::load(x + v * kSize).to_float(a);
        Vec<T>::load(y + v * kSize).to_float(b);
#pragma unroll
        for (int i = 0; i < kSize; ++i) a[i] = derive(a[i], b[i], v * kSize + i);
        Vec<T>::from_float(a).store(x + v * kSize);
      }
    }
    for (int64_t j = vectors * kSize + threadIdx.x; j < count; j += blockDim.x) x[j] = narrow<T>(derive(widen(x[j]), widen(y[j]), j));
  }
  T* x;
  const U* y;
  int64_t count, vectors;
};

// Each makes the row's soft loss, by as many passes as it needs, and is then its derivative by a logit. The first pass also finds the
// log-sum of the hard loss.
template <class T, class U, Kind kKind>
struct JsdRow {
  static constexpr bool kFast = sizeof(T) == 2;
  __device__ __forceinline__ JsdRow(const DivergenceArgs& a, const Pair<T, U>& row, const U* y, Share& share, Scratchpad& pad)
      : scale(1 / a.loss.temperature), jsd(a.loss, share = log_sums(a, row, y, pad, scale)) {
    float sums[2] = {};
    const auto take = [&](float s, float t) {
      const Column<float> c = jsd(s, t);
      sums[0] += c.loss, sums[1] += c.slope;
    };
    row.read([&]<int kCount>(const float(&s)[kCount], const float(&t)[kCount], int64_t) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) take(s[i], t[i]);
    });
    for (int64_t j = a.vocab + threadIdx.x; j < a.teacher_vocab; j += blockDim.x) take(0.f, widen(y[j]));
    block_sums(sums, pad);
    loss = not_negative(sums[0]), slope = sums[1];
  }
  __device__ static Share log_sums(const DivergenceArgs& a, const Pair<T, U>& row, const U* y, Scratchpad& pad, float scale) {
    Share s = no_share();
    row.read([&]<int kCount>(const float(&x)[kCount], const float(&t)[kCount], int64_t) {
      float z[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) z[i] = x[i] * scale;
      add<kFast>(s.student, z);
#pragma unroll
      for (int i = 0; i < kCount; ++i) z[i] = t[i] * scale;
      add<kFast>(s.teacher, z);
      if (a.hard) add<kFast>(s.hard, x);
    });
    for (int64_t j = a.vocab + threadIdx.x; j < a.teacher_vocab; j += blockDim.x) {
      const float zero[1] = {}, z[1] = {widen(y[j]) * scale};
      add<kFast>(s.student, zero);
      add<kFast>(s.teacher, z);
    }
    return block_merge(s, pad);
  }
  __device__ __forceinline__ float operator()(float s, float t) const { return JsdDerivative<kKind, kFast>(jsd, slope, 1)(s, t); }
  float scale, loss, slope;
  Jsd<kKind, kFast> jsd;
};

template <class T, class U>
struct CosineRow {
  __device__ __forceinline__ CosineRow(const DivergenceArgs& a, const Pair<T, U>& row, const U* y, Share& share, Scratchpad& pad) {
    float sums[3] = {};
    row.read([&]<int kCount>(const float(&s)[kCount], const float(&t)[kCount], int64_t) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[0] += s[i] * s[i], sums[1] += t[i] * t[i], sums[2] += s[i] * t[i];
      if (a.hard) add<sizeof(T) == 2>(share.hard, s);
    });
    for (int64_t j = a.vocab + threadIdx.x; j < a.teacher_vocab; j += blockDim.x) {
      const float t = widen(y[j]);
      sums[1] += t * t;
    }
    if (a.hard) share = block_merge(share, pad);
    block_sums(sums, pad);
    const float least = 1e-8f * a.loss.temperature, norm = sqrtf(sums[0]), s = fmaxf(norm, least), t = fmaxf(sqrtf(sums[1]), least);
    const float cosine = sums[2] / s / t;  // one after the other: their product may overflow
    loss = a.loss.beta * (cosine > 1 ? 0.f : 1 - cosine);
    other = a.loss.beta / s / t, own = norm < least ? 0.f : a.loss.beta * cosine / s / s;
  }
  __device__ __forceinline__ float operator()(float s, float t) const { return s * own - t * other; }
  float loss, own, other;
};

template <class T, class U>
struct ProbabilityRow {
  static constexpr bool kFast = sizeof(T) == 2;
  __device__ __forceinline__ ProbabilityRow(const DivergenceArgs& a, const Pair<T, U>& row, const U*, Share& share, Scratchpad& pad)
      : scale(1 / a.loss.temperature) {
    row.read([&]<int kCount>(const float(&x)[kCount], const float(&)[kCount], int64_t) {
      float z[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) z[i] = x[i] * scale;
      add<kFast>(share.student, z);
      if (a.hard) add<kFast>(share.hard, x);
    });
    share = block_merge(share, pad);
    student = LogSoftmax(share.student);
    const float eps = fmaxf(a.loss.eps, 1.17549435e-38f);
    float sums[2] = {};
    row.read([&]<int kCount>(const float(&x)[kCount], const float(&p)[kCount], int64_t) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float log_p = logf(p[i] < eps ? eps : p[i]);  // a NaN stays
        sums[0] += times(p[i], log_p - student(x[i] * scale)), sums[1] += p[i];
      }
    });
    block_sums(sums, pad);
    loss = sums[0], total = sums[1];
  }
  __device__ __forceinline__ float operator()(float s, float p) const { return (exp_of<kFast>(student(s * scale)) * total - p) * scale; }
  float scale, loss, total;
  LogSoftmax student;
};

template <class T, class U, class Soft>
__global__ void __launch_bounds__(kThreads) passes_kernel(DivergenceArgs a) {
  __shared__ Scratchpad pad;
  const float share = a.stats ? a.stats->inverse_count : 1.f;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    T* x = static_cast<T*>(a.student) + row * a.student_stride;
    const U* y = static_cast<const U*>(a.teacher) + (a.teacher_row ? a.teacher_row[row] : row) * a.teacher_stride;
    const Label label(a, row);
    const Pair<T, U> pair(x, y, a.vocab);
    if (label.skipped) {  // of the row, so the whole block turns here
      if (a.gradient) pair.write([&](float, float, int64_t) { return label.constant(); });
      if (threadIdx.x == 0) {
        a.soft[row] = label.constant();
        if (a.hard) a.hard[row] = label.constant();
      }
      continue;
    }
    Share sums = no_share();
    const Soft soft(a, pair, y, sums, pad);
    const Hard<sizeof(T) == 2> hard(a, sums.hard, label.column, share);
    if (threadIdx.x == 0) {
      a.soft[row] = soft.loss;
      if (a.hard) a.hard[row] = -hard.log_p(widen(x[label.column]));
    }
    __syncthreads();  // the label's logit has been read; so have the partial sums, which the next row writes
    if (!a.gradient) continue;
    const float scale = a.loss.soft_scale * share;
    pair.write([&](float s, float t, int64_t j) { return soft(s, t) * scale + hard(s, j); });
  }
}

template <class T, class U, class Soft>
void launch(const DivergenceArgs& a, const Host& host) {
  const unsigned grid = static_cast<unsigned>(a.rows < 0x7fffffff ? a.rows : 0x7fffffff);
  passes_kernel<T, U, Soft><<<grid, threads_for(a.teacher_vocab), 0, stream_of(host)>>>(a);
}

}  // namespace

void divergence_cuda_passes(const DivergenceArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    if (a.loss.divergence == Divergence::kJensenShannon) {
      visit_kind(kind_of(a.loss.beta), [&]<Kind kKind>() { launch<T, T, JsdRow<T, T, kKind>>(a, host); });
    } else if (a.loss.divergence == Divergence::kCosine) {
      launch<T, T, CosineRow<T, T>>(a, host);
    } else {  // the caller's probabilities have a type of their own
      visit(a.teacher_dtype, [&]<class U>(Type<U>) { launch<T, U, ProbabilityRow<T, U>>(a, host); });
    }
  });
  check_launch(kOp);
}

}  // namespace liger::fused_linear_jsd
