// Tensors of a row map (core/row_map.h).
#pragma once
#include <liger_kernel/core/row_map.h>
#include <liger_kernel/core/torch/torch.h>

namespace liger {

// x as for rows_of -> y like x
inline Tensor row_map_forward(const char* op, void (&run)(const RowMapForward&, const Host&), const Tensor& x) {
  const Rows shape = rows_of(op, "x", x);
  const TorchHost host(x);
  Tensor y = output_like(x);
  run({.x = const_data(x),
       .y = data(y),
       .rows = shape.rows,
       .cols = shape.cols,
       .x_stride = shape.stride,
       .y_stride = shape.cols,
       .dtype = dtype_of(op, x)},
      host);
  return y;
}

// dy, y as for rows_of -> dx like dy
inline Tensor row_map_backward(const char* op, void (&run)(const RowMapBackward&, const Host&), const Tensor& dy, const Tensor& y) {
  const Rows shape = rows_of(op, "y", y), dy_shape = rows_like(op, "dy", dy, "y", y);
  const TorchHost host(y);
  Tensor dx = output_like(dy);
  run({.dy = const_data(dy),
       .y = const_data(y),
       .dx = data(dx),
       .rows = shape.rows,
       .cols = shape.cols,
       .dy_stride = dy_shape.stride,
       .y_stride = shape.stride,
       .dx_stride = shape.cols,
       .dtype = dtype_of(op, y)},
      host);
  return dx;
}

}  // namespace liger
