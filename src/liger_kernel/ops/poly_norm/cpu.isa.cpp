// PolyNorm on the CPU, compiled once per ISA. Both passes read a row twice, the second time from L1 or L2: its sums, then the write.
// dw and db are sums of rows' sums: each thread adds those of its rows in fp64, and the threads' are added in their order.
#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/poly_norm/poly_norm.h>

namespace liger::poly_norm {
namespace {

constexpr int kSums = kPowers + 1;  // of the backward: dw_3, dw_2, dw_1, db

// n <= kLanes values; a constant n == kLanes makes it a plain load.
template <class T>
F load_some(const T* p, int64_t n) {
  return n == kLanes ? load(p) : load(p, n);
}
template <class T>
void store_some(F v, T* p, int64_t n) {
  n == kLanes ? store(v, p) : store(v, p, n);
}

// Sums over a row; add(j, n, s) adds the terms of n values from column j on. A lane adds up a short run in fp32 before it joins the
// fp64 sum: long chains of rounded 16-bit products lose their ties to one side.
template <int kCount, class Add>
void sum_row(int64_t cols, double (&total)[kCount], Add&& add) {
  constexpr int64_t kRun = 128 * kLanes;
  const int64_t whole = cols / kLanes * kLanes;
  for (int64_t j = 0; j < whole;) {
    F s[kCount] = {}, t[kCount] = {};
    const int64_t stop = whole < j + kRun ? whole : j + kRun;
    for (; j + 2 * kLanes <= stop; j += 2 * kLanes) add(j, kLanes, s), add(j + kLanes, kLanes, t);
    for (; j < stop; j += kLanes) add(j, kLanes, s);
    for (int i = 0; i < kCount; i++) total[i] += sum(s[i] + t[i]);
  }
  if (whole < cols) {
    F s[kCount] = {};
    add(whole, cols - whole, s);
    for (int i = 0; i < kCount; i++) total[i] += sum(s[i]);
  }
}
// body(j, n) for every vector of a row.
template <class Body>
void for_each_vector(int64_t cols, Body&& body) {
  const int64_t whole = cols / kLanes * kLanes;
  for (int64_t j = 0; j < whole; j += kLanes) body(j, kLanes);
  if (whole < cols) body(whole, cols - whole);
}

float read(const void* p, DType dtype, int64_t i) {
  return visit(dtype, [&]<class T>(Type<T>) { return widen(static_cast<const T*>(p)[i]); });
}
void write(double v, void* p, DType dtype, int64_t i) {
  visit(dtype, [&]<class T>(Type<T>) { static_cast<T*>(p)[i] = narrow<T>(static_cast<float>(v)); });
}

template <class T>
void forward_rows(const ForwardArgs& a, int64_t begin, int64_t end) {
  const float bias = read(a.bias, a.bias_dtype, 0);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.y_stride;
    double even[kPowers] = {};  // sums of x^6, x^4, x^2
    sum_row(a.cols, even, [&](int64_t j, int64_t n, F* s) {
      const F v = load_some(x + j, n), square = v * v, fourth = square * square;
      s[0] += fourth * square, s[1] += fourth, s[2] += square;
    });
    float c[kPowers];
    for (int i = 0; i < kPowers; i++) {
      const float rstd = 1.f / std::sqrt(static_cast<float>(even[i] / static_cast<double>(a.cols)) + a.eps);
      a.rstd[row * kPowers + i] = rstd;
      c[i] = read(a.weight, a.weight_dtype, i) * rstd;
    }
    for_each_vector(a.cols, [&](int64_t j, int64_t n) {
      const F v = load_some(x + j, n);
      store_some(((c[0] * v + c[1]) * v + c[2]) * v + bias, y + j, n);
    });
  }
}

// Adds its rows' dw and db to `sums`.
template <class T>
void backward_rows(const BackwardArgs& a, double* sums, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    double products[kSums] = {};  // sums of g x^3, g x^2, g x, g
    sum_row(a.cols, products, [&](int64_t j, int64_t n, F* s) {
      const F v = load_some(x + j, n), g = load_some(dy + j, n), gx = g * v, gxx = gx * v;
      s[0] += gxx * v, s[1] += gxx, s[2] += gx, s[3] += g;
    });
    float scale[kPowers], pull[kPowers];  // p w_p r_p, and that times r_p^2 m_p
    for (int i = 0; i < kPowers; i++) {
      const float rstd = a.rstd[row * kPowers + i];
      sums[i] += rstd * products[i];
      scale[i] = static_cast<float>(kPowers - i) * read(a.weight, a.weight_dtype, i) * rstd;
      pull[i] = scale[i] * (rstd * (rstd * static_cast<float>(products[i] / static_cast<double>(a.cols))));
    }
    sums[kPowers] += products[kPowers];
    if (!a.dx) continue;
    T* dx = static_cast<T*>(a.dx) + row * a.dx_stride;
    for_each_vector(a.cols, [&](int64_t j, int64_t n) {
      const F v = load_some(x + j, n), g = load_some(dy + j, n), square = v * v;
      store_some(g * ((scale[0] * v + scale[1]) * v + scale[2]) - v * ((pull[0] * square + pull[1]) * square + pull[2]), dx + j, n);
    });
  }
}

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(a.rows, grain_for(2 * a.cols * sizeof(T)), [&](int64_t begin, int64_t end) { forward_rows<T>(a, begin, end); });
  });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  const int64_t grain = grain_for(3 * a.cols * size_of(a.dtype)), wanted = (a.rows + grain - 1) / grain;
  const int64_t parts = wanted < 1 ? 1 : wanted < host.threads() ? wanted : host.threads();
  const int64_t rows_per_part = (a.rows + parts - 1) / parts;
  const Scratch scratch = host.scratch(parts * kSums * sizeof(double));
  auto* sums = scratch.as<double>();
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; part++) {
        double own[kSums] = {};
        const int64_t first = part * rows_per_part, last = first + rows_per_part;
        backward_rows<T>(a, own, first, last < a.rows ? last : a.rows);
        std::memcpy(sums + part * kSums, own, sizeof own);
      }
    });
  });
  for (int i = 0; i < kSums; i++) {
    double total = 0;
    for (int64_t part = 0; part < parts; part++) total += sums[part * kSums + i];
    if (i < kPowers && a.dw) write(total, a.dw, a.weight_dtype, i);
    if (i == kPowers && a.db) write(total, a.db, a.bias_dtype, 0);
  }
}

}  // namespace liger::poly_norm
