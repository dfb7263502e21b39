// Jensen-Shannon divergence on the CPU, compiled once per ISA; threads take rows. One pass: both inputs are read once, the gradient is
// written once. Runs of 2048 columns are summed in fp32, the runs in fp64.
#include <algorithm>

#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/jsd/jsd.h>

namespace liger::jsd {
namespace {

#include <liger_kernel/ops/jsd/column.inl.h>

constexpr int64_t kRun = 2048;

template <class T, Kind kKind>
void forward_rows(const ForwardArgs& a, int64_t begin, int64_t end) {
  const float scale = a.scale * (a.stats ? a.stats->inverse_count : 1.f);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.log_q) + row * a.q_stride;
    const T* y = static_cast<const T*>(a.log_p) + row * a.p_stride;
    T* dx = a.dx ? static_cast<T*>(a.dx) + row * a.dx_stride : nullptr;
    if (a.target && a.target[row * a.target_stride] == a.ignore_index) {
      if (dx) std::fill(dx, dx + a.cols, narrow<T>(0.f));
      a.loss[row] = 0;
      continue;
    }
    double loss = 0;
    const auto derive = [&](F log_q, F log_p, F& run) {
      const Column<F> c = column<kKind, false>(log_q, log_p, a.beta);
      run += c.loss;
      const F d = kKind == Kind::kForward ? -c.p : kKind == Kind::kReverse ? c.slope + c.q : c.slope;
      return d * scale;
    };
    for (int64_t first = 0; first < a.cols; first += kRun) {
      const int64_t stop = std::min(a.cols, first + kRun);
      F s0{}, s1{};
      int64_t j = first;
      for (; j + 2 * kLanes <= stop; j += 2 * kLanes) {
        const F d0 = derive(load(x + j), load(y + j), s0), d1 = derive(load(x + j + kLanes), load(y + j + kLanes), s1);
        if (dx) store(d0, dx + j), store(d1, dx + j + kLanes);
      }
      for (; j < stop; j += kLanes) {
        const int64_t n = std::min<int64_t>(kLanes, stop - j);
        const F d = derive(load(x + j, n, -kInf), load(y + j, n, -kInf), s0);
        if (dx) store(d, dx + j, n);
      }
      loss += sum(s0 + s1);
    }
    a.loss[row] = static_cast<float>(loss * scale);
  }
}

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    visit_kind(kind_of(a.beta), [&]<Kind kKind>() {
      host.parallel_for(a.rows, grain_for(a.cols * 8), [&](int64_t begin, int64_t end) { forward_rows<T, kKind>(a, begin, end); });
    });
  });
}

}  // namespace liger::jsd
