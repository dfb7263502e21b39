// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/layer_norm/layer_norm.h>

namespace liger::layer_norm {
namespace {

using Optional = std::optional<Tensor>;

void check_columns(const Tensor& x, int64_t cols, const char* what, const Optional& t) {
  if (!t) return;
  check_devices("layer_norm", x, *t);
  LIGER_CHECK(t->dim() == 1 && t->size(0) == cols, "layer_norm: ", what, " has ", t->numel(), " elements in ", t->dim(),
              " dimensions, x has ", cols, " columns; they must be equal");
  LIGER_CHECK(t->is_contiguous(), "layer_norm: ", what, " is not contiguous");
}

// The type of `t`, or without it what stands for it.
DType dtype_or(const Optional& t, DType otherwise) { return t ? dtype_of("layer_norm", *t) : otherwise; }

// x as for rows_of, weight and bias [cols] or none -> y like x; mean and rstd [rows] fp32
std::tuple<Tensor, Tensor, Tensor> forward_torch(const Tensor& x, const Optional& weight, const Optional& bias, double eps,
                                                 double weight_offset) {
  const Rows shape = rows_of("layer_norm", "x", x);
  check_columns(x, shape.cols, "weight", weight);
  check_columns(x, shape.cols, "bias", bias);
  const TorchHost host(x);
  const DType dtype = dtype_of("layer_norm", x), weight_dtype = dtype_or(weight, dtype_or(bias, dtype));
  const DType bias_dtype = dtype_or(bias, weight_dtype);
  Tensor y = output_like(x);
  Tensor mean = empty(x, {shape.rows}, ScalarType::Float);
  Tensor rstd = empty(x, {shape.rows}, ScalarType::Float);
  forward({.x = const_data(x),
           .weight = weight ? const_data(*weight) : nullptr,
           .bias = bias ? const_data(*bias) : nullptr,
           .y = data(y),
           .mean = data<float>(mean),
           .rstd = data<float>(rstd),
           .rows = shape.rows,
           .cols = shape.cols,
           .x_stride = shape.stride,
           .y_stride = shape.cols,
           .dtype = dtype,
           .weight_dtype = weight_dtype,
           .bias_dtype = bias_dtype,
           .eps = static_cast<float>(eps),
           .weight_offset = static_cast<float>(weight_offset)},
          host);
  return {y, mean, rstd};
}

// -> dx like dy, dw like weight, db like bias; each of no elements when not wanted
std::tuple<Tensor, Tensor, Tensor> backward_torch(const Tensor& dy, const Tensor& x, const Optional& weight, const Optional& bias,
                                                  const Tensor& mean, const Tensor& rstd, double weight_offset, bool want_dx, bool want_dw,
                                                  bool want_db) {
  const Rows shape = rows_of("layer_norm", "x", x), dy_shape = rows_like("layer_norm", "dy", dy, "x", x);
  check_columns(x, shape.cols, "weight", weight);
  check_columns(x, shape.cols, "bias", bias);
  check_devices("layer_norm", x, dy, mean, rstd);
  for (const Tensor* t : {&mean, &rstd}) {
    LIGER_CHECK(t->scalar_type() == ScalarType::Float && t->is_contiguous() && t->numel() == shape.rows,
                "layer_norm: mean and rstd must be those of the forward: fp32, contiguous, ", shape.rows, " elements");
  }
  LIGER_CHECK((weight || !want_dw) && (bias || !want_db), "layer_norm: a gradient is wanted of a weight or bias that is not given");
  const TorchHost host(x);
  const DType dtype = dtype_of("layer_norm", x), weight_dtype = dtype_or(weight, dtype);
  Tensor dx = output_like(dy, want_dx);
  Tensor dw = empty(x, {want_dw ? shape.cols : 0}, want_dw ? weight->scalar_type() : ScalarType::Float);
  Tensor db = empty(x, {want_db ? shape.cols : 0}, want_db ? bias->scalar_type() : ScalarType::Float);
  backward({.dy = const_data(dy),
            .x = const_data(x),
            .weight = weight ? const_data(*weight) : nullptr,
            .mean = const_data<float>(mean),
            .rstd = const_data<float>(rstd),
            .dx = want_dx ? data(dx) : nullptr,
            .dw = want_dw ? data(dw) : nullptr,
            .db = want_db ? data(db) : nullptr,
            .rows = shape.rows,
            .cols = shape.cols,
            .dy_stride = dy_shape.stride,
            .x_stride = shape.stride,
            .dx_stride = shape.cols,
            .dtype = dtype,
            .weight_dtype = weight_dtype,
            .bias_dtype = dtype_or(bias, dtype),
            .weight_offset = static_cast<float>(weight_offset)},
           host);
  return {dx, dw, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def(
      "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, float weight_offset) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, float weight_offset, "
      "bool want_dx, bool want_dw, bool want_db) -> (Tensor dx, Tensor dw, Tensor db)");
}

#define LIGER_REGISTER(key)                                    \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {            \
    m.impl("layer_norm_forward", TORCH_BOX(&forward_torch));   \
    m.impl("layer_norm_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::layer_norm
