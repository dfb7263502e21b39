// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/fused_add_rms_norm/fused_add_rms_norm.h>

namespace liger::fused_add_rms_norm {
namespace {

constexpr const char* kOp = "fused_add_rms_norm";

Rounding rounding_of(int64_t mode) {
  LIGER_CHECK(mode >= -1 && mode <= 1, kOp, ": rounding is ", mode, ", expected -1 (each step), 0 (before the weight) or 1 (last)");
  return static_cast<Rounding>(mode);
}

void check_weight(const Tensor& x, int64_t cols, const std::optional<Tensor>& weight) {
  if (!weight) return;
  check_devices(kOp, x, *weight);
  LIGER_CHECK(weight->dim() == 1 && weight->size(0) == cols, kOp, ": weight has ", weight->numel(), " elements, x has ", cols, " columns");
  LIGER_CHECK(weight->is_contiguous(), kOp, ": weight is not contiguous");
}

// x, residual as for rows_of, weight [cols] or none -> y and s like x, rstd [rows] fp32
std::tuple<Tensor, Tensor, Tensor> forward_torch(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight, double eps,
                                                 double weight_offset, int64_t rounding) {
  const DType dtype = dtype_of(kOp, x);
  const Rows shape = rows_of(kOp, "x", x);
  const int64_t residual_stride = rows_like(kOp, "residual", residual, "x", x).stride;
  check_weight(x, shape.cols, weight);
  const TorchHost host(x);
  Tensor y = output_like(x);
  Tensor s = output_like(x);
  Tensor rstd = empty(x, {shape.rows}, ScalarType::Float);
  forward({.x = const_data(x),
           .residual = const_data(residual),
           .weight = weight ? const_data(*weight) : nullptr,
           .y = data(y),
           .s = data(s),
           .rstd = data<float>(rstd),
           .rows = shape.rows,
           .cols = shape.cols,
           .x_stride = shape.stride,
           .residual_stride = residual_stride,
           .y_stride = shape.cols,
           .s_stride = shape.cols,
           .dtype = dtype,
           .weight_dtype = weight ? dtype_of(kOp, *weight) : dtype,
           .eps = static_cast<float>(eps),
           .weight_offset = static_cast<float>(weight_offset),
           .rounding = rounding_of(rounding)},
          host);
  return {y, s, rstd};
}

// -> dx like s (no elements when not wanted), dw [cols] of weight's type (empty when not wanted)
std::tuple<Tensor, Tensor> backward_torch(const Tensor& dy, const std::optional<Tensor>& ds, const Tensor& s,
                                          const std::optional<Tensor>& weight, const Tensor& rstd, double weight_offset, int64_t rounding,
                                          bool want_dx, bool want_dw) {
  const DType dtype = dtype_of(kOp, s);
  const Rows shape = rows_of(kOp, "s", s);
  const int64_t dy_stride = rows_like(kOp, "dy", dy, "s", s).stride, ds_stride = ds ? rows_like(kOp, "ds", *ds, "s", s).stride : 0;
  check_weight(s, shape.cols, weight);
  check_devices(kOp, s, rstd);
  LIGER_CHECK(rstd.scalar_type() == ScalarType::Float && rstd.is_contiguous() && rstd.numel() == shape.rows, kOp, ": rstd has ",
              rstd.numel(), " elements, expected ", shape.rows, " of fp32, contiguous, as forward returned them");
  const TorchHost host(s);
  Tensor dx = output_like(s, want_dx);
  Tensor dw = empty(s, {want_dw ? shape.cols : 0}, weight ? weight->scalar_type() : s.scalar_type());
  backward({.dy = const_data(dy),
            .ds = ds ? const_data(*ds) : nullptr,
            .s = const_data(s),
            .weight = weight ? const_data(*weight) : nullptr,
            .rstd = const_data<float>(rstd),
            .dx = want_dx ? data(dx) : nullptr,
            .dw = want_dw ? data(dw) : nullptr,
            .rows = shape.rows,
            .cols = shape.cols,
            .dy_stride = dy_stride,
            .ds_stride = ds_stride,
            .s_stride = shape.stride,
            .dx_stride = shape.cols,
            .dtype = dtype,
            .weight_dtype = weight ? dtype_of(kOp, *weight) : dtype,
            .dw_dtype = weight ? dtype_of("fused_add_rms_norm", *weight) : DType::kF32,
            .weight_offset = static_cast<float>(weight_offset),
            .rounding = rounding_of(rounding)},
           host);
  return {dx, dw};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def(
      "fused_add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, int rounding)"
      " -> (Tensor y, Tensor s, Tensor rstd)");
  m.def(
      "fused_add_rms_norm_backward(Tensor dy, Tensor? ds, Tensor s, Tensor? weight, Tensor rstd, float weight_offset, int rounding,"
      " bool want_dx, bool want_dw) -> (Tensor dx, Tensor dw)");
}

#define LIGER_REGISTER(key)                                            \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {                    \
    m.impl("fused_add_rms_norm_forward", TORCH_BOX(&forward_torch));   \
    m.impl("fused_add_rms_norm_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::fused_add_rms_norm
