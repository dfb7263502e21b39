// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/softmax/softmax.h>

namespace liger::softmax {
namespace {

// x as for rows_of -> y like x
Tensor forward_torch(const Tensor& x) {
  const Rows shape = rows_of("softmax", "x", x);
  const TorchHost host(x);
  Tensor y = output_like(x);
  forward({.x = const_data(x),
           .y = data(y),
           .rows = shape.rows,
           .cols = shape.cols,
           .x_stride = shape.stride,
           .y_stride = shape.cols,
           .dtype = dtype_of("softmax", x)},
          host);
  return y;
}

// dy, y as for rows_of -> dx like dy
Tensor backward_torch(const Tensor& dy, const Tensor& y) {
  const Rows shape = rows_of("softmax", "y", y), dy_shape = rows_of("softmax", "dy", dy);
  check_devices("softmax", y, dy);
  LIGER_CHECK(dy_shape.rows == shape.rows && dy_shape.cols == shape.cols, "softmax: dy is ", dy_shape.rows, " x ", dy_shape.cols, ", y is ",
              shape.rows, " x ", shape.cols, "; they must be equal");
  LIGER_CHECK(dy.scalar_type() == y.scalar_type(), "softmax: dy and y differ in dtype; cast dy to y's");
  const TorchHost host(y);
  Tensor dx = output_like(dy);
  backward({.dy = const_data(dy),
            .y = const_data(y),
            .dx = data(dx),
            .rows = shape.rows,
            .cols = shape.cols,
            .dy_stride = dy_shape.stride,
            .y_stride = shape.stride,
            .dx_stride = shape.cols,
            .dtype = dtype_of("softmax", y)},
           host);
  return dx;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("softmax_forward(Tensor x) -> Tensor");
  m.def("softmax_backward(Tensor dy, Tensor y) -> Tensor");
}

#define LIGER_REGISTER(key)                                 \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {         \
    m.impl("softmax_forward", TORCH_BOX(&forward_torch));   \
    m.impl("softmax_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::softmax
