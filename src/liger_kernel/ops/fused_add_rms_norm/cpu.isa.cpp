// Residual addition and RMSNorm on the CPU, compiled once per ISA. Forward reads x and residual once, writes s with the sum of
// its squares, and reads s again from L1/L2 for y. Backward reads s and dy twice likewise and ds once; each thread sums dw over
// its own rows into an fp32 row of scratch, and the rows of all threads are added in thread order, so the result does not
// depend on timing.
#include <liger_kernel/core/cpu/rms.inl.h>
#include <liger_kernel/ops/fused_add_rms_norm/fused_add_rms_norm.h>

namespace liger::fused_add_rms_norm {
namespace {

template <class T, class W>
void forward_rows(const ForwardArgs& a, int64_t begin, int64_t end) {
  const int64_t cols = a.cols, body = cols / kLanes * kLanes, wide = cols / (4 * kLanes) * 4 * kLanes, tail = cols - body;
  const W* weight = static_cast<const W*>(a.weight);
  const bool each_step = a.rounding == Rounding::kEachStep;
  const F offset = set(each_step ? round_to<T>(a.weight_offset) : a.weight_offset);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    T* s = static_cast<T*>(a.s) + row * a.s_stride;

    // Writes s at column j; its squares, of the rounded values.
    const auto add = [&](int64_t j) {
      const F v = rounded<T>(load(x + j) + load(residual + j));
      store(v, s + j);
      return v * v;
    };
    // Long fp32 sums of bf16 squares lose their ties to one side, so each lane adds up a short run only.
    double squares = 0;
    int64_t j = 0;
    for (int64_t stop = 0; j < wide;) {
      F s0{}, s1{}, s2{}, s3{};
      for (stop = wide < stop + kRun ? wide : stop + kRun; j < stop; j += 4 * kLanes) {
        s0 += add(j), s1 += add(j + kLanes), s2 += add(j + 2 * kLanes), s3 += add(j + 3 * kLanes);
      }
      squares += sum((s0 + s1) + (s2 + s3));
    }
    F rest{};
    for (; j < body; j += kLanes) rest += add(j);
    if (tail) {
      const F v = rounded<T>(load(x + body, tail) + load(residual + body, tail));
      store(v, s + body, tail);
      rest += v * v;
    }
    const float mean = static_cast<float>((squares + sum(rest)) / static_cast<double>(cols));
    const float eps = each_step ? round_to<T>(a.eps) : a.eps;
    float rstd = 1.f / std::sqrt((each_step ? round_to<T>(mean) : mean) + eps);
    if (each_step) rstd = round_to<T>(rstd);
    a.rstd[row] = rstd;

    for (j = 0; j < body; j += kLanes) store(normalise<T>(load(s + j), rstd, weight_at(weight, j, offset), a.rounding), y + j);
    if (tail) store(normalise<T>(load(s + body, tail), rstd, weight_at(weight, body, offset, tail), a.rounding), y + body, tail);
  }
}

// dx = rstd * (g - s * c) + ds, c = rstd^2 mean(g s); dw += dy * hat.
template <class T, class W>
void backward_rows(const BackwardArgs& a, float* dw, int64_t begin, int64_t end) {
  const int64_t cols = a.cols, body = cols / kLanes * kLanes, tail = cols - body;
  const W* weight = static_cast<const W*>(a.weight);
  const F offset = set(a.weight_offset);
  const bool round_hat = a.rounding != Rounding::kLast;
  for (int64_t row = begin; row < end; row++) {
    const T* s = static_cast<const T*>(a.s) + row * a.s_stride;
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    const T* ds = a.ds ? static_cast<const T*>(a.ds) + row * a.ds_stride : nullptr;
    T* dx = a.dx ? static_cast<T*>(a.dx) + row * a.dx_stride : nullptr;
    const float rstd = a.rstd[row];

    float c = 0;
    if (dx) {
      F s0{}, s1{};
      int64_t j = 0;
      for (; j + 2 * kLanes <= body; j += 2 * kLanes) {
        s0 += load(dy + j) * weight_at(weight, j, offset) * load(s + j);
        s1 += load(dy + j + kLanes) * weight_at(weight, j + kLanes, offset) * load(s + j + kLanes);
      }
      for (; j < body; j += kLanes) s0 += load(dy + j) * weight_at(weight, j, offset) * load(s + j);
      if (tail) s1 += load(dy + body, tail) * weight_at(weight, body, offset, tail) * load(s + body, tail);
      c = sum(s0 + s1) / static_cast<float>(cols) * rstd * rstd;
    }
    const auto step = [&](F g, F v, F w, F& sum_dw) {
      const F hat = v * rstd;
      sum_dw += g * (round_hat ? rounded<T>(hat) : hat);
      return (g * w - v * c) * rstd;
    };
    for (int64_t j = 0; j < body; j += kLanes) {
      F sum_dw = dw ? load(dw + j) : F{};
      const F d = step(load(dy + j), load(s + j), weight_at(weight, j, offset), sum_dw);
      if (dw) store(sum_dw, dw + j);
      if (dx) store(ds ? d + load(ds + j) : d, dx + j);
    }
    if (tail) {
      F sum_dw = dw ? load(dw + body, tail) : F{};
      const F d = step(load(dy + body, tail), load(s + body, tail), weight_at(weight, body, offset, tail), sum_dw);
      if (dw) store(sum_dw, dw + body, tail);
      if (dx) store(ds ? d + load(ds + body, tail) : d, dx + body, tail);
    }
  }
}

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    visit(a.weight_dtype, [&]<class W>(Type<W>) {
      host.parallel_for(a.rows, grain_for(2 * a.cols * sizeof(T)), [&](int64_t begin, int64_t end) { forward_rows<T, W>(a, begin, end); });
    });
  });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  rms_backward(a, host, [&]<class T, class W>(float* dw, int64_t first, int64_t last) { backward_rows<T, W>(a, dw, first, last); });
}

}  // namespace liger::fused_add_rms_norm
