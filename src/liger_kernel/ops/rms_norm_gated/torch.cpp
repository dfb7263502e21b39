// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/rms_norm_gated/rms_norm_gated.h>

namespace liger::rms_norm_gated {
namespace {

constexpr const char* kOp = "rms_norm_gated";

Rounding rounding_of(int64_t mode) {
  LIGER_CHECK(mode == 0 || mode == 1, kOp, ": rounding is ", mode, ", expected 0 (before the weight) or 1 (last)");
  return static_cast<Rounding>(mode);
}

Activation activation_of(int64_t activation) {
  LIGER_CHECK(activation == 0 || activation == 1, kOp, ": activation is ", activation, ", expected 0 (SiLU) or 1 (sigmoid)");
  return static_cast<Activation>(activation);
}

void check_weight(const Tensor& x, int64_t cols, const std::optional<Tensor>& weight) {
  if (!weight) return;
  check_devices(kOp, x, *weight);
  LIGER_CHECK(weight->dim() == 1 && weight->size(0) == cols, kOp, ": weight has ", weight->numel(), " elements, x has ", cols, " columns");
  LIGER_CHECK(weight->is_contiguous(), kOp, ": weight is not contiguous");
}

int64_t groups_of(int64_t cols, int64_t group_size) {
  LIGER_CHECK(group_size > 0 && cols % group_size == 0, kOp, ": group_size is ", group_size, ", expected a divisor of the ", cols,
              " columns of x");
  return cols / group_size;
}

// x, gate as for rows_of, weight [cols] or none -> y like x, rstd [rows * cols / group_size] fp32
std::tuple<Tensor, Tensor> forward_torch(const Tensor& x, const std::optional<Tensor>& gate, const std::optional<Tensor>& weight,
                                         double eps, int64_t group_size, bool norm_first, int64_t activation, int64_t rounding) {
  const DType dtype = dtype_of(kOp, x);
  const Rows shape = rows_of(kOp, "x", x);
  const int64_t gate_stride = gate ? rows_like(kOp, "gate", *gate, "x", x).stride : shape.cols;
  check_weight(x, shape.cols, weight);
  const int64_t groups = groups_of(shape.cols, group_size);
  const TorchHost host(x);
  Tensor y = output_like(x);
  Tensor rstd = empty(x, {shape.rows * groups}, ScalarType::Float);
  forward({.x = const_data(x),
           .gate = gate ? const_data(*gate) : nullptr,
           .weight = weight ? const_data(*weight) : nullptr,
           .y = data(y),
           .rstd = data<float>(rstd),
           .rows = shape.rows,
           .cols = shape.cols,
           .group_size = group_size,
           .x_stride = shape.stride,
           .gate_stride = gate_stride,
           .y_stride = shape.cols,
           .dtype = dtype,
           .weight_dtype = weight ? dtype_of(kOp, *weight) : dtype,
           .eps = static_cast<float>(eps),
           .activation = activation_of(activation),
           .norm_first = norm_first,
           .rounding = rounding_of(rounding)},
          host);
  return {y, rstd};
}

// -> dx and dgate like dy, dw [cols] of weight's type; of no elements when not wanted
std::tuple<Tensor, Tensor, Tensor> backward_torch(const Tensor& dy, const Tensor& x, const std::optional<Tensor>& gate,
                                                  const std::optional<Tensor>& weight, const Tensor& rstd, int64_t group_size,
                                                  bool norm_first, int64_t activation, int64_t rounding, bool want_dx, bool want_dgate,
                                                  bool want_dw) {
  const DType dtype = dtype_of(kOp, x);
  const Rows shape = rows_of(kOp, "x", x);
  const int64_t dy_stride = rows_like(kOp, "dy", dy, "x", x).stride,
                gate_stride = gate ? rows_like(kOp, "gate", *gate, "x", x).stride : shape.cols;
  check_weight(x, shape.cols, weight);
  check_devices(kOp, x, rstd);
  const int64_t groups = groups_of(shape.cols, group_size);
  LIGER_CHECK(rstd.scalar_type() == ScalarType::Float && rstd.is_contiguous() && rstd.numel() == shape.rows * groups, kOp, ": rstd has ",
              rstd.numel(), " elements, expected ", shape.rows * groups, " of fp32, contiguous, as forward returned them");
  LIGER_CHECK(gate || !want_dgate, kOp, ": there is no gate, and so no gradient of one");
  const TorchHost host(x);
  Tensor dx = output_like(dy, want_dx), dgate = output_like(dy, want_dgate);
  Tensor dw = empty(x, {want_dw ? shape.cols : 0}, weight ? weight->scalar_type() : x.scalar_type());
  backward({.dy = const_data(dy),
            .x = const_data(x),
            .gate = gate ? const_data(*gate) : nullptr,
            .weight = weight ? const_data(*weight) : nullptr,
            .rstd = const_data<float>(rstd),
            .dx = want_dx ? data(dx) : nullptr,
            .dgate = want_dgate ? data(dgate) : nullptr,
            .dw = want_dw ? data(dw) : nullptr,
            .rows = shape.rows,
            .cols = shape.cols,
            .group_size = group_size,
            .dy_stride = dy_stride,
            .x_stride = shape.stride,
            .gate_stride = gate_stride,
            .dx_stride = shape.cols,
            .dgate_stride = shape.cols,
            .dtype = dtype,
            .weight_dtype = weight ? dtype_of(kOp, *weight) : dtype,
            .dw_dtype = weight ? dtype_of(kOp, *weight) : dtype,
            .activation = activation_of(activation),
            .norm_first = norm_first,
            .rounding = rounding_of(rounding)},
           host);
  return {dx, dgate, dw};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def(
      "rms_norm_gated_forward(Tensor x, Tensor? gate, Tensor? weight, float eps, int group_size, bool norm_first, int activation,"
      " int rounding) -> (Tensor y, Tensor rstd)");
  m.def(
      "rms_norm_gated_backward(Tensor dy, Tensor x, Tensor? gate, Tensor? weight, Tensor rstd, int group_size, bool norm_first,"
      " int activation, int rounding, bool want_dx, bool want_dgate, bool want_dw) -> (Tensor dx, Tensor dgate, Tensor dw)");
}

#define LIGER_REGISTER(key)                                        \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {                \
    m.impl("rms_norm_gated_forward", TORCH_BOX(&forward_torch));   \
    m.impl("rms_norm_gated_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::rms_norm_gated
