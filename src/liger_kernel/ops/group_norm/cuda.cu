// GroupNorm on CUDA.
//
// forward:  1. mean and rstd of each group in one read, by merging means and squared deviations (Chan et al. 1983), which keeps the
//              accuracy of rows far from zero;   2. y, plane by plane: x is read again, from L2 where it fits.
// backward: 1. sums of dy and dy (x - mean) of each plane;   2. of each group, from its planes';   3. of each channel: dw and db;
//           4. dx, plane by plane. x and dy are read twice.
// Fixed orders of addition, no atomics: results repeat bit for bit.
// cuda_vector: 16-byte accesses; cuda_scalar: planes of any size and alignment.
#include <liger_kernel/core/cuda/block_reduce.cuh>
#include <liger_kernel/core/cuda/element.cuh>
#include <liger_kernel/core/cuda/gated.cuh>
#include <liger_kernel/ops/group_norm/plan.h>

namespace liger::group_norm {
namespace {

constexpr int kThreads = kGatedThreads;
constexpr int kLoads = 4;  // of each operand, in flight

// For the first of two reads: data that a later kernel reads again stays in L2.
template <class Access, class T>
__device__ __forceinline__ Access load_kept(const T* p) {
  if constexpr (Access::kSize > 1) {
    return Access::load(p);
  } else {
    return Access::load_streaming(p);  // a plain load
  }
}

// Count, mean and squared deviations from it, of some elements; the count is a float, whose rounding does not matter.
struct Moments {
  float count, mean, squares;
};
__device__ __forceinline__ Moments merge(const Moments& a, const Moments& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const float count = a.count + b.count, share = b.count / count, gap = b.mean - a.mean;
  return {count, a.mean + gap * share, a.squares + b.squares + gap * gap * share * a.count};
}

// mean and rstd of group `row`; kTeam threads take one.
template <class T, class Access, int kTeam>
__global__ void __launch_bounds__(kThreads) statistics_kernel(ForwardArgs a) {
  constexpr int kSize = Access::kSize, kTeams = kThreads / kTeam;
  __shared__ Moments scratch[kThreads / 32];
  const int64_t size = a.channels / a.groups * a.spatial, rows = a.batch * a.groups;
  const int lane = threadIdx.x % kTeam;
  for (int64_t first = blockIdx.x * int64_t{kTeams}; first < rows; first += gridDim.x * int64_t{kTeams}) {
    const int64_t row = first + threadIdx.x / kTeam;
    Moments total{};
    if (row < rows) {
      const T* x = static_cast<const T*>(a.x) + row * size;
      for (int64_t j = int64_t{lane} * kSize; j < size; j += int64_t{kLoads} * kTeam * kSize) {
        Access held[kLoads];
#pragma unroll
        for (int v = 0; v < kLoads; ++v) {
          const int64_t k = j + int64_t{v} * kTeam * kSize;
          if (k < size) held[v] = load_kept<Access>(x + k);
        }
#pragma unroll
        for (int v = 0; v < kLoads; ++v) {
          if (j + int64_t{v} * kTeam * kSize >= size) break;
          float values[kSize], mean = 0, squares = 0;
          held[v].to_float(values);
#pragma unroll
          for (int i = 0; i < kSize; ++i) mean += values[i];
          mean /= kSize;
#pragma unroll
          for (int i = 0; i < kSize; ++i) squares += (values[i] - mean) * (values[i] - mean);
          total = merge(total, {kSize, mean, squares});
        }
      }
    }
    // Lane 0 has the team's.
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      const Moments other{__shfl_down_sync(~0u, total.count, lanes), __shfl_down_sync(~0u, total.mean, lanes),
                          __shfl_down_sync(~0u, total.squares, lanes)};
      total = merge(total, other);
    }
    if constexpr (kTeam > 32) {
      if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = total;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int w = 1; w < kThreads / 32; ++w) total = merge(total, scratch[w]);
      }
      __syncthreads();  // scratch is free for the next row
    }
    if (lane == 0 && row < rows) {
      a.mean[row] = total.mean;
      a.rstd[row] = rsqrtf(total.squares / static_cast<float>(size) + a.eps);
    }
  }
}

template <class T, class Access>
__global__ void __launch_bounds__(kThreads) forward_kernel(ForwardArgs a, GatedPlan plan) {
  constexpr int kSize = Access::kSize;
  const int64_t planes = a.batch * a.channels;
  for (int64_t block = blockIdx.x; block < plan.blocks; block += gridDim.x) {
    const GatedSpot spot = gated_spot<kSize>(plan, block);
    if (spot.row >= planes) continue;
    const T* px = static_cast<const T*>(a.x) + spot.row * a.spatial;
    T* py = static_cast<T*>(a.y) + spot.row * a.spatial;
    Access x[kLoads];
#pragma unroll
    for (int v = 0; v < kLoads; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j < a.spatial) x[v] = Access::load_streaming(px + j);
    }
    const int64_t group = spot.row / (a.channels / a.groups), channel = spot.row % a.channels;
    const float mean = a.mean[group], scale = a.rstd[group] * read(a.weight, a.weight_dtype, channel);
    const float bias = read(a.bias, a.bias_dtype, channel);
#pragma unroll
    for (int v = 0; v < kLoads; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j >= a.spatial) break;
      float values[kSize];
      x[v].to_float(values);
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[i] = (values[i] - mean) * scale + bias;
      Access::from_float(values).store_streaming(py + j);
    }
  }
}

// sums[plane]: of dy and of dy (x - mean); kTeam threads take one.
template <class T, class Access, int kTeam>
__global__ void __launch_bounds__(kThreads) planes_kernel(BackwardArgs a, float2* sums) {
  constexpr int kSize = Access::kSize, kTeams = kThreads / kTeam;
  __shared__ float2 scratch[kThreads / 32];
  const int64_t planes = a.batch * a.channels;
  const int lane = threadIdx.x % kTeam;
  for (int64_t first = blockIdx.x * int64_t{kTeams}; first < planes; first += gridDim.x * int64_t{kTeams}) {
    const int64_t plane = first + threadIdx.x / kTeam;
    float2 total{};
    if (plane < planes) {
      const T* px = static_cast<const T*>(a.x) + plane * a.spatial;
      const T* pdy = static_cast<const T*>(a.dy) + plane * a.spatial;
      const float mean = a.mean[plane / (a.channels / a.groups)];
      for (int64_t j = int64_t{lane} * kSize; j < a.spatial; j += int64_t{kLoads} * kTeam * kSize) {
        Access x[kLoads], dy[kLoads];
#pragma unroll
        for (int v = 0; v < kLoads; ++v) {
          const int64_t k = j + int64_t{v} * kTeam * kSize;
          if (k >= a.spatial) continue;
          x[v] = load_kept<Access>(px + k);
          dy[v] = load_kept<Access>(pdy + k);
        }
#pragma unroll
        for (int v = 0; v < kLoads; ++v) {
          if (j + int64_t{v} * kTeam * kSize >= a.spatial) break;
          float xs[kSize], gs[kSize];
          x[v].to_float(xs);
          dy[v].to_float(gs);
#pragma unroll
          for (int i = 0; i < kSize; ++i) total.x += gs[i], total.y += gs[i] * (xs[i] - mean);
        }
      }
    }
    total.x = warp_sum(total.x);
    total.y = warp_sum(total.y);
    if constexpr (kTeam > 32) {
      if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = total;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int w = 1; w < kThreads / 32; ++w) total.x += scratch[w].x, total.y += scratch[w].y;
      }
      __syncthreads();  // scratch is free for the next plane
    }
    if (lane == 0 && plane < planes) sums[plane] = total;
  }
}

// means[group]: of g, and of g hat times rstd; a warp takes one group.
__global__ void __launch_bounds__(kThreads) groups_kernel(BackwardArgs a, const float2* sums, float2* means) {
  const int64_t channels = a.channels / a.groups, groups = a.batch * a.groups;
  const int lane = threadIdx.x % 32;
  for (int64_t group = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32; group < groups; group += gridDim.x * int64_t{kThreads / 32}) {
    float g = 0, product = 0;
    for (int64_t c = lane; c < channels; c += 32) {
      const float weight = read(a.weight, a.weight_dtype, group % a.groups * channels + c);
      const float2 plane = sums[group * channels + c];
      g += weight * plane.x, product += weight * plane.y;
    }
    g = warp_sum(g);
    product = warp_sum(product);
    const float size = static_cast<float>(channels * a.spatial), rstd = a.rstd[group];
    if (lane == 0) means[group] = {g / size, product / size * rstd * rstd};
  }
}

// dw and db; a warp takes one channel.
__global__ void __launch_bounds__(kThreads) channels_kernel(BackwardArgs a, const float2* sums) {
  const int64_t channels = a.channels / a.groups;
  const int lane = threadIdx.x % 32;
  for (int64_t c = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32; c < a.channels; c += gridDim.x * int64_t{kThreads / 32}) {
    float dw = 0, db = 0;
    for (int64_t b = lane; b < a.batch; b += 32) {
      const float2 plane = sums[b * a.channels + c];
      db += plane.x, dw += plane.y * a.rstd[b * a.groups + c / channels];
    }
    dw = warp_sum(dw);
    db = warp_sum(db);
    if (lane != 0) continue;
    if (a.dw) write(dw, a.dw, a.weight_dtype, c);
    if (a.db) write(db, a.db, a.bias_dtype, c);
  }
}

template <class T, class Access>
__global__ void __launch_bounds__(kThreads) backward_kernel(BackwardArgs a, const float2* means, GatedPlan plan) {
  constexpr int kSize = Access::kSize;
  const int64_t planes = a.batch * a.channels;
  for (int64_t block = blockIdx.x; block < plan.blocks; block += gridDim.x) {
    const GatedSpot spot = gated_spot<kSize>(plan, block);
    if (spot.row >= planes) continue;
    const T* px = static_cast<const T*>(a.x) + spot.row * a.spatial;
    const T* pdy = static_cast<const T*>(a.dy) + spot.row * a.spatial;
    T* dx = static_cast<T*>(a.dx) + spot.row * a.spatial;
    Access x[kGatedBackwardAccesses], dy[kGatedBackwardAccesses];
#pragma unroll
    for (int v = 0; v < kGatedBackwardAccesses; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j >= a.spatial) continue;
      x[v] = Access::load_streaming(px + j);
      dy[v] = Access::load_streaming(pdy + j);
    }
    const int64_t group = spot.row / (a.channels / a.groups);
    const float mean = a.mean[group], rstd = a.rstd[group], weight = read(a.weight, a.weight_dtype, spot.row % a.channels);
    const float2 of_group = means[group];
#pragma unroll
    for (int v = 0; v < kGatedBackwardAccesses; ++v) {
      const int64_t j = spot.column + v * spot.step;
      if (j >= a.spatial) break;
      float xs[kSize], gs[kSize];
      x[v].to_float(xs);
      dy[v].to_float(gs);
#pragma unroll
      for (int i = 0; i < kSize; ++i) xs[i] = (gs[i] * weight - of_group.x - (xs[i] - mean) * of_group.y) * rstd;
      Access::from_float(xs).store_streaming(dx + j);
    }
  }
}

unsigned grid_for(int64_t blocks) { return static_cast<unsigned>(blocks < 0x7fffffff ? blocks : 0x7fffffff); }
unsigned grid_of_teams(int64_t teams, int team) { return grid_for((teams * team + kThreads - 1) / kThreads); }

template <template <class> class Access>
void launch(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    constexpr int kSize = Access<T>::kSize;
    const int team = team_for(a.channels / a.groups * a.spatial, kSize);
    const auto statistics = team == 32 ? statistics_kernel<T, Access<T>, 32> : statistics_kernel<T, Access<T>, kThreads>;
    statistics<<<grid_of_teams(a.batch * a.groups, team), kThreads, 0, stream_of(host)>>>(a);
    check_launch("group_norm");
    const GatedPlan plan = cover_gated(a.batch * a.channels, a.spatial, kSize, kLoads);
    forward_kernel<T, Access<T>><<<gated_grid(plan), kThreads, 0, stream_of(host)>>>(a, plan);
    check_launch("group_norm");
  });
}

template <template <class> class Access>
void launch(const BackwardArgs& a, const Host& host) {
  const int64_t planes = a.batch * a.channels, groups = a.batch * a.groups;
  const Scratch sums = host.scratch(planes * sizeof(float2)), means = a.dx ? host.scratch(groups * sizeof(float2)) : Scratch{};
  visit(a.dtype, [&]<class T>(Type<T>) {
    constexpr int kSize = Access<T>::kSize;
    if (planes > 0) {
      const int team = team_for(a.spatial, kSize);
      const auto kernel = team == 32 ? planes_kernel<T, Access<T>, 32> : planes_kernel<T, Access<T>, kThreads>;
      kernel<<<grid_of_teams(planes, team), kThreads, 0, stream_of(host)>>>(a, sums.as<float2>());
      check_launch("group_norm");
    }
    if (a.dw || a.db) {
      channels_kernel<<<grid_of_teams(a.channels, 32), kThreads, 0, stream_of(host)>>>(a, sums.as<float2>());
      check_launch("group_norm");
    }
    if (!a.dx || planes == 0) return;
    groups_kernel<<<grid_of_teams(groups, 32), kThreads, 0, stream_of(host)>>>(a, sums.as<float2>(), means.as<float2>());
    check_launch("group_norm");
    const GatedPlan plan = cover_gated(planes, a.spatial, kSize, kGatedBackwardAccesses);
    backward_kernel<T, Access<T>><<<gated_grid(plan), kThreads, 0, stream_of(host)>>>(a, means.as<float2>(), plan);
    check_launch("group_norm");
  });
}

}  // namespace

void forward_cuda_vector(const ForwardArgs& a, const Host& host) { launch<Vec>(a, host); }
void forward_cuda_scalar(const ForwardArgs& a, const Host& host) { launch<Single>(a, host); }
void backward_cuda_vector(const BackwardArgs& a, const Host& host) { launch<Vec>(a, host); }
void backward_cuda_scalar(const BackwardArgs& a, const Host& host) { launch<Single>(a, host); }

}  // namespace liger::group_norm
