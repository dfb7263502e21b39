// The passes between the products on the CPU, compiled once per ISA: moving rows with conversion, and column sums.
#include <algorithm>

#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/fused_linear_cross_entropy/fused_linear_cross_entropy.h>

namespace liger::fused_linear_cross_entropy {
namespace {

template <class S, class D>
void move_row(const S* src, D* dst, int64_t n, bool accumulate) {
  const int64_t body = n / kLanes * kLanes, tail = n - body;
  if (accumulate) {
    for (int64_t j = 0; j < body; j += kLanes) store(load(dst + j) + load(src + j), dst + j);
    if (tail) store(load(dst + body, tail) + load(src + body, tail), dst + body, tail);
  } else if constexpr (std::is_same_v<S, D>) {
    std::memcpy(dst, src, n * sizeof(S));
  } else {
    for (int64_t j = 0; j < body; j += kLanes) store(load(src + j), dst + j);
    if (tail) store(load(src + body, tail), dst + body, tail);
  }
}

// A strip of columns is read row by row, its sums staying in L1.
template <class T>
void sum_strip(const SumArgs& a, int64_t begin, int64_t end) {
  constexpr int64_t kStrip = 1024;
  for (int64_t first = begin; first < end; first += kStrip) {
    const int64_t n = std::min(kStrip, end - first), body = n / kLanes * kLanes, tail = n - body;
    float* out = a.out + first;
    if (!a.accumulate) std::memset(out, 0, n * sizeof(float));
    for (int64_t row = 0; row < a.rows; row++) {
      const T* p = static_cast<const T*>(a.a) + row * a.stride + first;
      for (int64_t j = 0; j < body; j += kLanes) store(load(out + j) + load(p + j), out + j);
      if (tail) store(load(out + body, tail) + load(p + body, tail), out + body, tail);
    }
  }
}

}  // namespace

void LIGER_STAMP(compact)(const CompactArgs& a, const Host&) {
  int64_t place = 0;
  for (int64_t row = 0; row < a.rows; row++) {
    const int64_t target = a.target[row * a.target_stride];
    a.slot[row] = -1;
    if (target == a.ignore_index || place == a.valid) continue;
    a.slot[row] = place;
    a.row_of[place] = row;
    a.target_out[place] = target;
    if (a.row_scale) a.row_scale_out[place] = a.row_scale[row];
    place++;
  }
  for (; place < a.valid; place++) a.row_of[place] = 0, a.target_out[place] = a.ignore_index;  // a count that was too large
}

void LIGER_STAMP(move_rows)(const MoveArgs& a, const Host& host) {
  const int64_t grain = grain_for(a.cols * size_of(a.dst_dtype));
  visit(a.src_dtype, [&]<class S>(Type<S>) {
    visit(a.dst_dtype, [&]<class D>(Type<D>) {
      host.parallel_for(a.rows, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          D* dst = static_cast<D*>(a.dst) + (a.dst_row ? a.dst_row[i] : i) * a.dst_stride;
          if (a.src) {
            move_row(static_cast<const S*>(a.src) + (a.src_row ? a.src_row[i] : i) * a.src_stride, dst, a.cols, a.accumulate);
          } else {
            std::memset(dst, 0, a.cols * sizeof(D));
          }
        }
      });
    });
  });
}

void LIGER_STAMP(column_sums)(const SumArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(a.cols, grain_for(a.rows * sizeof(T)), [&](int64_t begin, int64_t end) { sum_strip<T>(a, begin, end); });
  });
}

void LIGER_STAMP(spread)(const SpreadArgs& a, const Host& host) {
  host.parallel_for(a.rows, grain_for(a.dx ? a.hidden * size_of(a.dtype) : 32), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const int64_t slot = a.slot[row];
      a.loss_out[row] = slot < 0 ? 0.f : a.loss[slot];
      if (a.z_loss_out) a.z_loss_out[row] = slot < 0 ? 0.f : a.z_loss[slot];
      if (a.hit_out) a.hit_out[row] = slot < 0 ? 0.f : a.hit[slot];
      if (a.prediction_out) a.prediction_out[row] = slot < 0 ? -1 : a.prediction[slot];
      if (a.dx && slot < 0) std::memset(static_cast<char*>(a.dx) + row * a.hidden * size_of(a.dtype), 0, a.hidden * size_of(a.dtype));
    }
  });
}

}  // namespace liger::fused_linear_cross_entropy
