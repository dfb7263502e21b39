// What the CPU sources of rms_norm and fused_add_rms_norm share, compiled in each of their ISA units.
#pragma once
#include <cstring>

#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/core/rms.h>

namespace liger {
namespace {

constexpr int64_t kRun = 64 * 4 * kLanes;  // columns whose squares are summed in fp32 before they join the row's sum

// weight + offset at column j, n lanes; 1 without a weight.
template <class W>
F weight_at(const W* weight, int64_t j, F offset) {
  return weight ? load(weight + j) + offset : set(1.f);
}
template <class W>
F weight_at(const W* weight, int64_t j, F offset, int64_t n) {
  return weight ? load(weight + j, n) + offset : set(1.f);
}

template <class T>
F normalise(F x, float rstd, F w, Rounding rounding) {
  const F hat = x * rstd;
  if (rounding == Rounding::kLast) return hat * w;
  return rounded<T>(hat) * (rounding == Rounding::kEachStep ? rounded<T>(w) : w);
}

// The backward over all rows: `rows`.operator()<T, W>(dw, first, last) does a range and adds its share to the fp32 row dw, which may
// be nullptr. Every thread has a row of its own; they are added in thread order, so the result does not depend on timing.
template <class Args, class Rows>
void rms_backward(const Args& a, const Host& host, Rows&& rows) {
  const int64_t grain = grain_for(a.cols * 4);
  const int64_t wanted = (a.rows + grain - 1) / grain;
  const int64_t parts = wanted < 1 ? 1 : wanted < host.threads() ? wanted : host.threads();
  const int64_t rows_per_part = (a.rows + parts - 1) / parts;
  // Part 0 sums into dw itself where that is fp32, all others into scratch.
  const bool direct = a.dw_dtype == DType::kF32;
  const int64_t scratch_rows = parts - (direct ? 1 : 0);
  const Scratch scratch = a.dw && scratch_rows > 0 ? host.scratch(scratch_rows * a.cols * sizeof(float)) : Scratch{};
  const auto sums_of = [&](int64_t part) {
    if (direct && part == 0) return static_cast<float*>(a.dw);
    return scratch.as<float>() + (part - (direct ? 1 : 0)) * a.cols;
  };
  visit(a.dtype, [&]<class T>(Type<T>) {
    visit(a.weight_dtype, [&]<class W>(Type<W>) {
      host.parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; part++) {
          float* dw = a.dw ? sums_of(part) : nullptr;
          if (dw) std::memset(dw, 0, a.cols * sizeof(float));
          const int64_t first = part * rows_per_part, last = first + rows_per_part;
          rows.template operator()<T, W>(dw, first, last < a.rows ? last : a.rows);
        }
      });
    });
  });
  if (!a.dw) return;
  float* total = sums_of(0);
  for (int64_t part = 1; part < parts; part++) {
    const float* other = sums_of(part);
    for (int64_t j = 0; j < a.cols; j++) total[j] += other[j];
  }
  if (direct) return;
  visit(a.dw_dtype, [&]<class W>(Type<W>) {
    for (int64_t j = 0; j < a.cols; j++) store(load(total + j, 1), static_cast<W*>(a.dw) + j, 1);
  });
}

}  // namespace
}  // namespace liger
