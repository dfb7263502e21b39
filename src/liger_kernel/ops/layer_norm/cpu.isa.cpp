// LayerNorm on the CPU, compiled once per ISA. Forward reads a row twice (the second time from L1 or L2): its sums about a pivot,
// then the write. Backward reads x and dy twice: the two sums of the row, then dx, dw and db. Each thread adds dw and db over its own rows
// into fp32 rows of scratch, and those of all threads are added in thread order, so the result does not depend on timing.
#include <liger_kernel/core/cpu/vectors.inl.h>
#include <liger_kernel/ops/layer_norm/layer_norm.h>

namespace liger::layer_norm {
namespace {

// The lanes that count; zero in the others.
inline F keep(F v, All) { return v; }
inline F keep(F v, int64_t n) {
  float lanes[kLanes];
  store(v, lanes);
  return load(lanes, n);
}

// Starts to bring the line of the next row into the cache while this row is written: what a row waits for most are its stores to
// lines not there yet. Behind the last row it does nothing.
inline void fetch(const void* p) { __builtin_prefetch(p); }
inline void fetch_to_write(const void* p) { __builtin_prefetch(p, 1); }

constexpr int kTogether = 2;  // rows of the backward

template <int kSums>
struct Sums {
  double of[kSums];
};

// Sums over a row; add(j, n, sums) adds the terms of one vector. Lanes add up short runs, and then the runs: in a long fp32 chain
// small terms would be lost to one side.
template <int kSums, class Add>
Sums<kSums> sum_row(int64_t cols, Add&& add) {
  constexpr int kChains = 4;
  constexpr int64_t kStep = kChains * kLanes, kRun = 16 * kStep;
  const int64_t wide = cols / kStep * kStep, whole = cols / kLanes * kLanes;
  F total[kSums] = {};
  int64_t j = 0;
  while (j < wide) {
    F chain[kChains][kSums] = {};
    const int64_t stop = wide < j + kRun ? wide : j + kRun;
    for (; j < stop; j += kStep) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; c++) add(j + c * kLanes, All{}, chain[c]);
    }
#pragma GCC unroll 2
    for (int s = 0; s < kSums; s++) total[s] += (chain[0][s] + chain[1][s]) + (chain[2][s] + chain[3][s]);
  }
  F rest[kSums] = {};
  for (; j < whole; j += kLanes) add(j, All{}, rest);
  if (j < cols) add(j, cols - j, rest);
  Sums<kSums> sums;
  for (int s = 0; s < kSums; s++) sums.of[s] = static_cast<double>(sum(total[s])) + static_cast<double>(sum(rest[s]));
  return sums;
}

template <class T>
void forward_rows(const ForwardArgs& a, const float* weight, const float* bias, int64_t begin, int64_t end) {
  const auto cols = static_cast<double>(a.cols);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;

    // Sums about a pivot: the mean of the first columns, or, where that is over a standard deviation from the row's, what it
    // gives for the row's. x - pivot is exact where it matters, so neither mean nor variance cancels.
    const int64_t first = a.cols < kLanes ? a.cols : kLanes;
    float pivot = sum(load(x, first)) / static_cast<float>(first);
    double rest, variance;
    for (int attempt = 0; attempt < 2; attempt++) {
      if (attempt) pivot += static_cast<float>(rest);
      const Sums<2> about = sum_row<2>(a.cols, [&](int64_t j, auto n, F* s) {
        const F d = keep(load(x + j, n) - pivot, n);
        s[0] += d;
        s[1] += d * d;
      });
      rest = about.of[0] / cols;
      variance = about.of[1] / cols - rest * rest;
      if (rest * rest <= variance) break;
    }
    const double inverse = 1 / std::sqrt((variance < 0 ? 0 : variance) + static_cast<double>(a.eps));
    const auto rstd = static_cast<float>(inverse), shift = static_cast<float>(-rest * inverse);
    a.mean[row] = static_cast<float>(pivot + rest);
    a.rstd[row] = rstd;

    for_each_vector(a.cols, [&](int64_t j, auto n) {
      fetch(x + a.x_stride + j);
      fetch_to_write(y + a.y_stride + j);
      store(((load(x + j, n) - pivot) * rstd + shift) * load(weight + j, n) + load(bias + j, n), y + j, n);
    });
  }
}

// dx = rstd (g - mean(g) - (x - mean) c), c = rstd^2 mean(g (x - mean)); dw += dy hat, db += dy. kRows rows at a time, so that dw
// and db are read and written once for all of them.
template <class T, int kRows>
void backward_rows(const BackwardArgs& a, const float* weight, float* dw, float* db, int64_t row) {
  struct Row {
    const T* x;
    const T* dy;
    T* dx;
    float mean, rstd, mean_g, c;
  } rows[kRows];
  for (Row& r : rows) {
    r = {.x = static_cast<const T*>(a.x) + row * a.x_stride,
         .dy = static_cast<const T*>(a.dy) + row * a.dy_stride,
         .dx = a.dx ? static_cast<T*>(a.dx) + row * a.dx_stride : nullptr,
         .mean = a.mean[row],
         .rstd = a.rstd[row],
         .mean_g = 0,
         .c = 0};
    row++;
    if (!a.dx) continue;
    const Sums<2> sums = sum_row<2>(a.cols, [&](int64_t j, auto n, F* s) {
      const F g = load(r.dy + j, n) * load(weight + j, n);
      s[0] += g;
      s[1] += g * (load(r.x + j, n) - r.mean);
    });
    r.mean_g = static_cast<float>(sums.of[0] / static_cast<double>(a.cols));
    r.c = static_cast<float>(sums.of[1] / static_cast<double>(a.cols)) * r.rstd * r.rstd;
  }
  for_each_vector(a.cols, [&](int64_t j, auto n) {
    // All loads before the stores: rows often lie a multiple of 4 KB apart, and a load waits for an earlier store to its offset in 4 KB.
    F sum_dw = dw ? load(dw + j, n) : F{}, sum_db = dw ? load(db + j, n) : F{}, dx[kRows];
    const F w = load(weight + j, n);
    for (const Row& r : rows) {
      fetch(r.x + kRows * a.x_stride + j);
      fetch(r.dy + kRows * a.dy_stride + j);
      if (r.dx) fetch_to_write(r.dx + kRows * a.dx_stride + j);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; i++) {
      const Row& r = rows[i];
      const F g = load(r.dy + j, n), d = load(r.x + j, n) - r.mean;
      sum_dw += g * (d * r.rstd);
      sum_db += g;
      dx[i] = (g * w - r.mean_g - d * r.c) * r.rstd;
    }
    if (dw) {
      store(sum_dw, dw + j, n);
      store(sum_db, db + j, n);
    }
    for (int i = 0; i < kRows && a.dx; i++) store(dx[i], rows[i].dx + j, n);
  });
}

// values + offset in fp32, `missing` everywhere without values: the caller's own array where it is just that, else in `memory`.
const float* as_fp32(const void* values, DType dtype, float offset, float missing, int64_t cols, const Host& host, Scratch& memory) {
  if (values && dtype == DType::kF32 && offset == 0) return static_cast<const float*>(values);
  memory = host.scratch(cols * sizeof(float));
  float* out = memory.as<float>();
  visit(dtype, [&]<class W>(Type<W>) {
    for_each_vector(
        cols, [&](int64_t j, auto n) { store(values ? load(static_cast<const W*>(values) + j, n) + offset : set(missing), out + j, n); });
  });
  return out;
}

// out = sum over parts of the fp32 rows at `partial`, `stride` apart.
void add_parts(const float* partial, int64_t parts, int64_t stride, void* out, DType dtype, int64_t cols) {
  visit(dtype, [&]<class W>(Type<W>) {
    for_each_vector(cols, [&](int64_t j, auto n) {
      F total = load(partial + j, n);
      for (int64_t part = 1; part < parts; part++) total += load(partial + part * stride + j, n);
      store(total, static_cast<W*>(out) + j, n);
    });
  });
}

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  Scratch weight_memory, bias_memory;
  const float* weight = as_fp32(a.weight, a.weight_dtype, a.weight_offset, 1, a.cols, host, weight_memory);
  const float* bias = as_fp32(a.bias, a.bias_dtype, 0, 0, a.cols, host, bias_memory);
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(a.rows, grain_for(a.cols * sizeof(T)),
                      [&](int64_t begin, int64_t end) { forward_rows<T>(a, weight, bias, begin, end); });
  });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  Scratch weight_memory;
  const float* weight = as_fp32(a.weight, a.weight_dtype, a.weight_offset, 1, a.cols, host, weight_memory);
  const int64_t grain = grain_for(a.cols * 4);
  const int64_t wanted = (a.rows + grain - 1) / grain;
  const int64_t parts = wanted < 1 ? 1 : wanted < host.threads() ? wanted : host.threads();
  const int64_t rows_per_part = (a.rows + parts - 1) / parts;
  const bool sums = a.dw || a.db;
  const Scratch partial = sums ? host.scratch(parts * 2 * a.cols * sizeof(float)) : Scratch{};  // [parts, dw and db, cols]
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; part++) {
        float* dw = sums ? partial.as<float>() + part * 2 * a.cols : nullptr;
        if (sums) std::memset(dw, 0, 2 * a.cols * sizeof(float));
        float* db = sums ? dw + a.cols : nullptr;
        int64_t row = part * rows_per_part;
        const int64_t last = row + rows_per_part < a.rows ? row + rows_per_part : a.rows;
        for (; row + kTogether <= last; row += kTogether) backward_rows<T, kTogether>(a, weight, dw, db, row);
        for (; row < last; row++) backward_rows<T, 1>(a, weight, dw, db, row);
      }
    });
  });
  if (a.dw) add_parts(partial.as<float>(), parts, 2 * a.cols, a.dw, a.weight_dtype, a.cols);
  if (a.db) add_parts(partial.as<float>() + a.cols, parts, 2 * a.cols, a.db, a.bias_dtype, a.cols);
}

}  // namespace liger::layer_norm
