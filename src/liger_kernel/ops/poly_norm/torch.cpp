// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/poly_norm/poly_norm.h>

namespace liger::poly_norm {
namespace {

void check_parameters(const Tensor& x, const Tensor& weight, const Tensor& bias) {
  check_devices("poly_norm", x, weight, bias);
  LIGER_CHECK(weight.dim() == 1 && weight.size(0) == kPowers && weight.is_contiguous(), "poly_norm: weight has ", weight.numel(),
              " elements in ", weight.dim(), " dimensions, expected ", kPowers, " in one, contiguous");
  LIGER_CHECK(bias.numel() == 1, "poly_norm: bias has ", bias.numel(), " elements, expected 1");
}

// x as for rows_of, weight [3], bias of one element -> y like x, rstd [rows, 3] fp32
std::tuple<Tensor, Tensor> forward_torch(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const Rows shape = rows_of("poly_norm", "x", x);
  check_parameters(x, weight, bias);
  const TorchHost host(x);
  Tensor y = output_like(x);
  Tensor rstd = empty(x, {shape.rows, kPowers}, ScalarType::Float);
  forward({.x = const_data(x),
           .weight = const_data(weight),
           .bias = const_data(bias),
           .y = data(y),
           .rstd = data<float>(rstd),
           .rows = shape.rows,
           .cols = shape.cols,
           .x_stride = shape.stride,
           .y_stride = shape.cols,
           .dtype = dtype_of("poly_norm", x),
           .weight_dtype = dtype_of("poly_norm", weight),
           .bias_dtype = dtype_of("poly_norm", bias),
           .eps = static_cast<float>(eps)},
          host);
  return {y, rstd};
}

// -> dx like dy, dw [3] of weight's dtype, db [1] of bias's; each of no elements when not wanted
std::tuple<Tensor, Tensor, Tensor> backward_torch(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                  const Tensor& rstd, bool want_dx, bool want_dw, bool want_db) {
  const Rows shape = rows_of("poly_norm", "x", x), dy_shape = rows_like("poly_norm", "dy", dy, "x", x);
  check_parameters(x, weight, bias);
  check_devices("poly_norm", x, dy, rstd);
  LIGER_CHECK(rstd.scalar_type() == ScalarType::Float && rstd.is_contiguous() && rstd.numel() == shape.rows * kPowers,
              "poly_norm: rstd must be that of the forward: fp32, contiguous, ", shape.rows, " x ", kPowers);
  const TorchHost host(x);
  Tensor dx = output_like(dy, want_dx);
  Tensor dw = empty(x, {want_dw ? kPowers : 0}, weight.scalar_type());
  Tensor db = empty(x, {want_db ? 1 : 0}, bias.scalar_type());
  backward({.dy = const_data(dy),
            .x = const_data(x),
            .weight = const_data(weight),
            .rstd = const_data<float>(rstd),
            .dx = want_dx ? data(dx) : nullptr,
            .dw = want_dw ? data(dw) : nullptr,
            .db = want_db ? data(db) : nullptr,
            .rows = shape.rows,
            .cols = shape.cols,
            .dy_stride = dy_shape.stride,
            .x_stride = shape.stride,
            .dx_stride = shape.cols,
            .dtype = dtype_of("poly_norm", x),
            .weight_dtype = dtype_of("poly_norm", weight),
            .bias_dtype = dtype_of("poly_norm", bias)},
           host);
  return {dx, dw, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("poly_norm_forward(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor rstd)");
  m.def(
      "poly_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor rstd, bool want_dx, bool want_dw, bool want_db)"
      " -> (Tensor dx, Tensor dw, Tensor db)");
}

#define LIGER_REGISTER(key)                                   \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {           \
    m.impl("poly_norm_forward", TORCH_BOX(&forward_torch));   \
    m.impl("poly_norm_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::poly_norm
