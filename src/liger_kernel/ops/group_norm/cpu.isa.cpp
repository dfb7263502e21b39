// GroupNorm on the CPU, compiled once per ISA; a thread takes whole groups. Forward reads a group three times (from L1 or L2 after
// the first): its sum, the sums of the centred elements and of their squares, then the write. Backward reads x and dy twice: the sums
// of each plane, then dx. dw and db are sums over the batch of the planes' sums, added in order.
#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/group_norm/group_norm.h>

namespace liger::group_norm {
namespace {

// n <= kLanes values; a constant n == kLanes makes it a plain load.
template <class T>
F load_some(const T* p, int64_t n) {
  return n == kLanes ? load(p) : load(p, n);
}
template <class T>
void store_some(F v, T* p, int64_t n) {
  n == kLanes ? store(v, p) : store(v, p, n);
}
// v in the first n lanes, zero in the others.
F keep(F v, int64_t n) {
  if (n == kLanes) return v;
  float lanes[kLanes];
  store(v, lanes);
  return load(lanes, n);
}

// Sums over a row; add(j, n, s) adds the terms of n values from element j on. A lane adds up a short run in fp32 before it joins
// the fp64 sum.
template <int kCount, class Add>
void sum_row(int64_t size, double (&total)[kCount], Add&& add) {
  constexpr int64_t kRun = 128 * kLanes;
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t j = 0; j < whole;) {
    F s[kCount] = {}, t[kCount] = {};
    const int64_t stop = whole < j + kRun ? whole : j + kRun;
    for (; j + 2 * kLanes <= stop; j += 2 * kLanes) add(j, kLanes, s), add(j + kLanes, kLanes, t);
    for (; j < stop; j += kLanes) add(j, kLanes, s);
    for (int i = 0; i < kCount; i++) total[i] += sum(s[i] + t[i]);
  }
  if (whole < size) {
    F s[kCount] = {};
    add(whole, size - whole, s);
    for (int i = 0; i < kCount; i++) total[i] += sum(s[i]);
  }
}
// body(j, n) for every vector of a row.
template <class Body>
void for_each_vector(int64_t size, Body&& body) {
  const int64_t whole = size / kLanes * kLanes;
  for (int64_t j = 0; j < whole; j += kLanes) body(j, kLanes);
  if (whole < size) body(whole, size - whole);
}

float read(const void* p, DType dtype, int64_t i) {
  return visit(dtype, [&]<class P>(Type<P>) { return widen(static_cast<const P*>(p)[i]); });
}
void write(double v, void* p, DType dtype, int64_t i) {
  visit(dtype, [&]<class P>(Type<P>) { static_cast<P*>(p)[i] = narrow<P>(static_cast<float>(v)); });
}

template <class T>
void forward_groups(const ForwardArgs& a, int64_t begin, int64_t end) {
  const int64_t channels = a.channels / a.groups, size = channels * a.spatial;
  const auto count = static_cast<double>(size);
  for (int64_t group = begin; group < end; group++) {
    const T* x = static_cast<const T*>(a.x) + group * size;
    T* y = static_cast<T*>(a.y) + group * size;
    double total[1] = {}, centred[2] = {};
    sum_row(size, total, [&](int64_t j, int64_t n, F* s) { s[0] += load_some(x + j, n); });
    const auto rough = static_cast<float>(total[0] / count);
    sum_row(size, centred, [&](int64_t j, int64_t n, F* s) {
      const F d = keep(load_some(x + j, n) - rough, n);
      s[0] += d, s[1] += d * d;
    });
    // What rounding left in the mean.
    const double rest = centred[0] / count, variance = centred[1] / count - rest * rest;
    const float mean = rough + static_cast<float>(rest), rstd = 1.f / std::sqrt(static_cast<float>(variance < 0 ? 0 : variance) + a.eps);
    a.mean[group] = mean;
    a.rstd[group] = rstd;
    for (int64_t c = 0; c < channels; c++, x += a.spatial, y += a.spatial) {
      const int64_t channel = group % a.groups * channels + c;
      const float scale = rstd * read(a.weight, a.weight_dtype, channel), bias = read(a.bias, a.bias_dtype, channel);
      for_each_vector(a.spatial, [&](int64_t j, int64_t n) { store_some((load_some(x + j, n) - mean) * scale + bias, y + j, n); });
    }
  }
}

// sums: [batch, channels, 2], of dy and dy (x - mean) over each plane.
template <class T>
void backward_groups(const BackwardArgs& a, double* sums, int64_t begin, int64_t end) {
  const int64_t channels = a.channels / a.groups, size = channels * a.spatial;
  for (int64_t group = begin; group < end; group++) {
    const T* x = static_cast<const T*>(a.x) + group * size;
    const T* dy = static_cast<const T*>(a.dy) + group * size;
    const float mean = a.mean[group], rstd = a.rstd[group];
    double g = 0, product = 0;
    for (int64_t c = 0; c < channels; c++) {
      const T* px = x + c * a.spatial;
      const T* pdy = dy + c * a.spatial;
      double plane[2] = {};
      sum_row(a.spatial, plane, [&](int64_t j, int64_t n, F* s) {
        const F d = load_some(pdy + j, n);
        s[0] += d, s[1] += d * (load_some(px + j, n) - mean);
      });
      std::memcpy(sums + (group * channels + c) * 2, plane, sizeof plane);
      const double weight = read(a.weight, a.weight_dtype, group % a.groups * channels + c);
      g += weight * plane[0], product += weight * plane[1];
    }
    if (!a.dx) continue;
    const auto mean_g = static_cast<float>(g / static_cast<double>(size));
    const float pull = static_cast<float>(product / static_cast<double>(size)) * rstd * rstd;
    for (int64_t c = 0; c < channels; c++) {
      const T* px = x + c * a.spatial;
      const T* pdy = dy + c * a.spatial;
      T* dx = static_cast<T*>(a.dx) + group * size + c * a.spatial;
      const float weight = read(a.weight, a.weight_dtype, group % a.groups * channels + c);
      for_each_vector(a.spatial, [&](int64_t j, int64_t n) {
        store_some((load_some(pdy + j, n) * weight - mean_g - (load_some(px + j, n) - mean) * pull) * rstd, dx + j, n);
      });
    }
  }
}

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    const int64_t grain = grain_for(2 * a.channels / a.groups * a.spatial * sizeof(T));
    host.parallel_for(a.batch * a.groups, grain, [&](int64_t begin, int64_t end) { forward_groups<T>(a, begin, end); });
  });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  const Scratch scratch = host.scratch(a.batch * a.channels * 2 * sizeof(double));
  auto* sums = scratch.as<double>();
  visit(a.dtype, [&]<class T>(Type<T>) {
    const int64_t grain = grain_for(3 * a.channels / a.groups * a.spatial * sizeof(T));
    host.parallel_for(a.batch * a.groups, grain, [&](int64_t begin, int64_t end) { backward_groups<T>(a, sums, begin, end); });
  });
  for (int64_t c = 0; c < a.channels; c++) {
    double dw = 0, db = 0;
    for (int64_t b = 0; b < a.batch; b++) {
      const double* plane = sums + (b * a.channels + c) * 2;
      db += plane[0], dw += plane[1] * a.rstd[b * a.groups + c / (a.channels / a.groups)];
    }
    if (a.dw) write(dw, a.dw, a.weight_dtype, c);
    if (a.db) write(db, a.db, a.bias_dtype, c);
  }
}

}  // namespace liger::group_norm
