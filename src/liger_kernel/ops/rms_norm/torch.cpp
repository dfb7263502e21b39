// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/rms_norm/rms_norm.h>

namespace liger::rms_norm {
namespace {

Rounding rounding_of(int64_t mode) {
  LIGER_CHECK(mode >= -1 && mode <= 1, "rms_norm: rounding is ", mode, ", expected -1 (each step), 0 (before the weight) or 1 (last)");
  return static_cast<Rounding>(mode);
}

void check_weight(const Tensor& x, int64_t cols, const std::optional<Tensor>& weight) {
  if (!weight) return;
  check_devices("rms_norm", x, *weight);
  LIGER_CHECK(weight->dim() == 1 && weight->size(0) == cols, "rms_norm: weight has ", weight->numel(), " elements, x has ", cols,
              " columns");
  LIGER_CHECK(weight->is_contiguous(), "rms_norm: weight is not contiguous");
}

// x as for rows_of, weight [cols] or none -> y like x, rstd [rows] fp32
std::tuple<Tensor, Tensor> forward_torch(const Tensor& x, const std::optional<Tensor>& weight, double eps, double weight_offset,
                                         int64_t rounding) {
  const Rows shape = rows_of("rms_norm", "x", x);
  check_weight(x, shape.cols, weight);
  const TorchHost host(x);
  Tensor y = output_like(x);
  Tensor rstd = empty(x, {shape.rows}, ScalarType::Float);
  const DType dtype = dtype_of("rms_norm", x);
  forward({.x = const_data(x),
           .weight = weight ? const_data(*weight) : nullptr,
           .y = data(y),
           .rstd = data<float>(rstd),
           .rows = shape.rows,
           .cols = shape.cols,
           .x_stride = shape.stride,
           .y_stride = shape.cols,
           .dtype = dtype,
           .weight_dtype = weight ? dtype_of("rms_norm", *weight) : dtype,
           .eps = static_cast<float>(eps),
           .weight_offset = static_cast<float>(weight_offset),
           .rounding = rounding_of(rounding)},
          host);
  return {y, rstd};
}

// -> dx like dy (no elements when not wanted), dw [cols] of weight's type (empty when not wanted)
std::tuple<Tensor, Tensor> backward_torch(const Tensor& dy, const Tensor& x, const std::optional<Tensor>& weight, const Tensor& rstd,
                                          double weight_offset, int64_t rounding, bool want_dx, bool want_dw) {
  const Rows shape = rows_of("rms_norm", "x", x), dy_shape = rows_like("rms_norm", "dy", dy, "x", x);
  check_weight(x, shape.cols, weight);
  check_devices("rms_norm", x, dy, rstd);
  const TorchHost host(x);
  Tensor dx = output_like(dy, want_dx);
  Tensor dw = empty(x, {want_dw ? shape.cols : 0}, weight ? weight->scalar_type() : x.scalar_type());
  const DType dtype = dtype_of("rms_norm", x);
  backward({.dy = const_data(dy),
            .x = const_data(x),
            .weight = weight ? const_data(*weight) : nullptr,
            .rstd = const_data<float>(rstd),
            .dx = want_dx ? data(dx) : nullptr,
            .dw = want_dw ? data(dw) : nullptr,
            .rows = shape.rows,
            .cols = shape.cols,
            .dy_stride = dy_shape.stride,
            .x_stride = shape.stride,
            .dx_stride = shape.cols,
            .dtype = dtype,
            .weight_dtype = weight ? dtype_of("rms_norm", *weight) : dtype,
            .dw_dtype = weight ? dtype_of("rms_norm", *weight) : DType::kF32,
            .weight_offset = static_cast<float>(weight_offset),
            .rounding = rounding_of(rounding)},
           host);
  return {dx, dw};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("rms_norm_forward(Tensor x, Tensor? weight, float eps, float weight_offset, int rounding) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float weight_offset, int rounding, bool want_dx, bool want_dw)"
      " -> (Tensor dx, Tensor dw)");
}

#define LIGER_REGISTER(key)                                  \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {          \
    m.impl("rms_norm_forward", TORCH_BOX(&forward_torch));   \
    m.impl("rms_norm_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::rms_norm
