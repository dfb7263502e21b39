// Squared ReLU on the CPU, compiled once per ISA: one pass, whole vectors, the tail as a partial one.
#include <liger_kernel/core/cpu/gated.inl.h>
#include <liger_kernel/ops/relu_squared/relu_squared.h>

namespace liger::relu_squared {
namespace {

// A comparison with NaN is false, so that NaN takes the product.
F value(F x) { return select(x <= 0.f, F{}, x * x); }
F gradient(F dy, F x) { return select(x <= 0.f, F{}, (x + x) * dy); }

}  // namespace

void LIGER_STAMP(forward)(const ForwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    for_each_piece(a.rows, a.cols, 2 * sizeof(T), host, [&](int64_t row, int64_t first, int64_t n) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride + first;
      T* y = static_cast<T*>(a.y) + row * a.y_stride + first;
      int64_t j = 0;
      for (; j + kLanes <= n; j += kLanes) store(value(load(x + j)), y + j);
      if (j < n) store(value(load(x + j, n - j)), y + j, n - j);
    });
  });
}

void LIGER_STAMP(backward)(const BackwardArgs& a, const Host& host) {
  visit(a.dtype, [&]<class T>(Type<T>) {
    for_each_piece(a.rows, a.cols, 3 * sizeof(T), host, [&](int64_t row, int64_t first, int64_t n) {
      const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride + first;
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride + first;
      T* dx = static_cast<T*>(a.dx) + row * a.dx_stride + first;
      int64_t j = 0;
      for (; j + kLanes <= n; j += kLanes) store(gradient(load(dy + j), load(x + j)), dx + j);
      if (j < n) store(gradient(load(dy + j, n - j), load(x + j, n - j)), dx + j, n - j);
    });
  });
}

}  // namespace liger::relu_squared
