// Dynamic tanh on the CPU, compiled once per ISA: one pass each way. Each thread adds dgamma and dbeta over its own rows into fp32 rows
// of scratch, and dalpha into an fp64 number; those of all threads are added in thread order, so the result does not depend on timing.
#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/dyt/dyt.h>

namespace liger::dyt {
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
// body(j, n) for every vector of a row.
template <class Body>
void for_each_vector(int64_t cols, Body&& body) {
  const int64_t whole = cols / kLanes * kLanes;
  for (int64_t j = 0; j < whole; j += kLanes) body(j, kLanes);
  if (whole < cols) body(whole, cols - whole);
}

float read(const void* p, DType dtype) {
  return visit(dtype, [&]<class P>(Type<P>) { return widen(*static_cast<const P*>(p)); });
}
// The parameter in fp32, zeros without one: the caller's own array where it is that, else in `memory`.
const float* as_fp32(const void* values, DType dtype, int64_t cols, const Host& host, Scratch& memory) {
  if (values && dtype == DType::kF32) return static_cast<const float*>(values);
  memory = host.scratch(cols * sizeof(float));
  auto* out = memory.as<float>();
  visit(dtype, [&]<class P>(Type<P>) {
    for_each_vector(cols,
                    [&](int64_t j, int64_t n) { store_some(values ? load_some(static_cast<const P*>(values) + j, n) : F{}, out + j, n); });
  });
  return out;
}

template <class T>
void backward_rows(const BackwardArgs& a, float alpha, const float* gamma, float* dgamma, float* dbeta, double& dalpha, int64_t begin,
                   int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
    T* dx = a.dx ? static_cast<T*>(a.dx) + row * a.dx_stride : nullptr;
    constexpr int64_t kRun = 128 * kLanes;  // columns whose terms of dalpha are added in fp32 before they join the sum
    for (int64_t first = 0; first < a.cols; first += kRun) {
      F products{};
      for_each_vector(a.cols - first < kRun ? a.cols - first : kRun, [&](int64_t k, int64_t n) {
        const int64_t j = first + k;
        const F v = load_some(x + j, n), g = load_some(dy + j, n), t = tanh(alpha * v);
        const F s = g * load_some(gamma + j, n) * (1.f - t * t);
        products += s * v;
        if (dx) store_some(s * alpha, dx + j, n);
        if (dgamma) store_some(load_some(dgamma + j, n) + g * t, dgamma + j, n);
        if (dbeta) store_some(load_some(dbeta + j, n) + g, dbeta + j, n);
      });
      dalpha += sum(products);
    }
  }
}

// out[j] = sum over parts of the fp32 rows at `partial`, `stride` apart.
void add_parts(const float* partial, int64_t parts, int64_t stride, void* out, DType dtype, int64_t cols) {
  visit(dtype, [&]<class P>(Type<P>) {
    for_each_vector(cols, [&](int64_t j, int64_t n) {
      F total{};
      for (int64_t part = 0; part < parts; part++) total += load_some(partial + part * stride + j, n);
      store_some(total, static_cast<P*>(out) + j, n);
    });
  });
}

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  Scratch gamma_memory, beta_memory;
  const float* gamma = as_fp32(a.gamma, a.gamma_dtype, a.cols, host, gamma_memory);
  const float* beta = as_fp32(a.beta, a.beta_dtype, a.cols, host, beta_memory);
  const float alpha = read(a.alpha, a.alpha_dtype);
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(a.rows, grain_for(2 * a.cols * sizeof(T)), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++) {
        const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
        T* y = static_cast<T*>(a.y) + row * a.y_stride;
        for_each_vector(a.cols, [&](int64_t j, int64_t n) {
          store_some(tanh(alpha * load_some(x + j, n)) * load_some(gamma + j, n) + load_some(beta + j, n), y + j, n);
        });
      }
    });
  });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  Scratch gamma_memory;
  const float* gamma = as_fp32(a.gamma, a.gamma_dtype, a.cols, host, gamma_memory);
  const float alpha = read(a.alpha, a.alpha_dtype);
  const int64_t grain = grain_for(3 * a.cols * size_of(a.dtype)), wanted = (a.rows + grain - 1) / grain;
  const int64_t parts = wanted < 1 ? 1 : wanted < host.threads() ? wanted : host.threads();
  const int64_t rows_per_part = (a.rows + parts - 1) / parts;
  const Scratch columns = host.scratch(parts * 2 * a.cols * sizeof(float)), numbers = host.scratch(parts * sizeof(double));
  visit(a.dtype, [&]<class T>(Type<T>) {
    host.parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; part++) {
        float* dgamma = columns.as<float>() + part * 2 * a.cols;
        float* dbeta = dgamma + a.cols;
        std::memset(dgamma, 0, 2 * a.cols * sizeof(float));
        double dalpha = 0;
        const int64_t first = part * rows_per_part, last = first + rows_per_part;
        backward_rows<T>(a, alpha, gamma, a.dgamma ? dgamma : nullptr, a.dbeta ? dbeta : nullptr, dalpha, first,
                         last < a.rows ? last : a.rows);
        numbers.as<double>()[part] = dalpha;
      }
    });
  });
  if (a.dgamma) add_parts(columns.as<float>(), parts, 2 * a.cols, a.dgamma, a.gamma_dtype, a.cols);
  if (a.dbeta) add_parts(columns.as<float>() + a.cols, parts, 2 * a.cols, a.dbeta, a.beta_dtype, a.cols);
  if (!a.dalpha) return;
  double total = 0;
  for (int64_t part = 0; part < parts; part++) total += numbers.as<double>()[part];
  visit(a.alpha_dtype, [&]<class P>(Type<P>) { *static_cast<P*>(a.dalpha) = narrow<P>(static_cast<float>(total)); });
}

}  // namespace liger::dyt
