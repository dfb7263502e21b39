// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/relu_squared/relu_squared.h>

namespace liger::relu_squared {
namespace {

// x as for rows_of -> y of x's shape
Tensor forward_torch(const Tensor& x) {
  const Rows rows = rows_of("relu_squared", "x", x);
  const TorchHost host(x);
  Tensor y = output_like(x);
  forward({.x = const_data(x),
           .y = data(y),
           .rows = rows.rows,
           .cols = rows.cols,
           .x_stride = rows.stride,
           .y_stride = rows.cols,
           .dtype = dtype_of("relu_squared", x)},
          host);
  return y;
}

// dy, x as for rows_of -> dx of dy's shape
Tensor backward_torch(const Tensor& dy, const Tensor& x) {
  const Rows rows = rows_of("relu_squared", "x", x), rows_dy = rows_like("relu_squared", "dy", dy, "x", x);
  check_devices("relu_squared", x, dy);
  const TorchHost host(x);
  Tensor dx = output_like(dy);
  backward({.dy = const_data(dy),
            .x = const_data(x),
            .dx = data(dx),
            .rows = rows.rows,
            .cols = rows.cols,
            .dy_stride = rows_dy.stride,
            .x_stride = rows.stride,
            .dx_stride = rows.cols,
            .dtype = dtype_of("relu_squared", x)},
           host);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("relu_squared_forward(Tensor x) -> Tensor");
  m.def("relu_squared_backward(Tensor dy, Tensor x) -> Tensor");
}

#define LIGER_REGISTER(key)                                      \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {              \
    m.impl("relu_squared_forward", TORCH_BOX(&forward_torch));   \
    m.impl("relu_squared_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::relu_squared
