// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/tvd/tvd.h>

namespace liger::tvd {
namespace {

const int64_t* labels_of(const std::optional<Tensor>& labels, const Tensor& input, int64_t rows) {
  if (!labels) return nullptr;
  check_devices("tvd", input, *labels);
  LIGER_CHECK(labels->dim() == 1 && labels->size(0) == rows, "tvd: shift_labels has ", labels->numel(), " elements, input has ", rows,
              " rows; they must be equal");
  LIGER_CHECK(labels->scalar_type() == ScalarType::Long, "tvd: shift_labels is not int64");
  return const_data<int64_t>(*labels);
}

float inverse(int64_t divisor) { return static_cast<float>(1. / static_cast<double>(divisor > 0 ? divisor : 1)); }
const float* scale_of(const std::optional<Tensor>& scale, const Tensor& input) {
  if (!scale) return nullptr;
  check_devices("tvd", input, *scale);
  LIGER_CHECK(scale->numel() == 1 && scale->scalar_type() == ScalarType::Float, "tvd: scale is not one fp32 number");
  return const_data<float>(*scale);
}

// input, target as for rows_of, labels [rows] int64 or none, scale: one fp32 number on their device, or none
// -> loss fp32, [1] sum scale / divisor or, when not reduced, like input; its gradient, like input or of no elements
std::tuple<Tensor, Tensor> forward_torch(const Tensor& input, const Tensor& target, const std::optional<Tensor>& labels,
                                         const std::optional<Tensor>& scale, bool reduce, int64_t divisor, int64_t ignore_index,
                                         bool want_grad) {
  const Rows shape = rows_of("tvd", "input", input), target_shape = rows_like("tvd", "target", target, "input", input, true);
  LIGER_CHECK(!want_grad || reduce, "tvd: no gradient is formed in forward without a reduction");
  const int64_t* label_data = labels_of(labels, input, shape.rows);
  const float* scale_data = scale_of(scale, input);
  const TorchHost host(input);
  Tensor loss = reduce ? empty(input, {1}, ScalarType::Float) : empty(input, input.sizes(), ScalarType::Float);
  Tensor grad = output_like(input, want_grad);
  forward({.input = const_data(input),
           .target = const_data(target),
           .labels = label_data,
           .scale = scale_data,
           .loss = reduce ? nullptr : data<float>(loss),
           .total = reduce ? data<float>(loss) : nullptr,
           .grad = want_grad ? data(grad) : nullptr,
           .rows = shape.rows,
           .cols = shape.cols,
           .input_stride = shape.stride,
           .target_stride = target_shape.stride,
           .loss_stride = shape.cols,
           .grad_stride = shape.cols,
           .labels_stride = labels ? labels->stride(0) : 0,
           .dtype = dtype_of("tvd", input),
           .target_dtype = dtype_of("tvd", target),
           .factor = reduce ? inverse(divisor) : 1.f,
           .ignore_index = ignore_index},
          host);
  return {loss, grad};
}

// dy fp32: one number when the loss was reduced, else as for rows_of -> gradient like input
Tensor backward_torch(const Tensor& dy, const Tensor& input, const Tensor& target, const std::optional<Tensor>& labels,
                      const std::optional<Tensor>& scale, bool reduce, int64_t divisor, int64_t ignore_index) {
  const Rows shape = rows_of("tvd", "input", input), target_shape = rows_like("tvd", "target", target, "input", input, true);
  check_devices("tvd", input, dy);
  LIGER_CHECK(dy.scalar_type() == ScalarType::Float, "tvd: dy is not fp32; cast it");
  LIGER_CHECK(!reduce || dy.numel() == 1, "tvd: dy has ", dy.numel(), " elements, the loss is one number");
  const int64_t* label_data = labels_of(labels, input, shape.rows);
  const float* scale_data = scale_of(scale, input);
  const TorchHost host(input);
  Tensor grad = output_like(input);
  backward({.dy = const_data<float>(dy),
            .of_total = reduce,
            .input = const_data(input),
            .target = const_data(target),
            .labels = label_data,
            .scale = scale_data,
            .grad = data(grad),
            .rows = shape.rows,
            .cols = shape.cols,
            .dy_stride = reduce ? 0 : rows_like("tvd", "dy", dy, "input", input, true).stride,
            .input_stride = shape.stride,
            .target_stride = target_shape.stride,
            .grad_stride = shape.cols,
            .labels_stride = labels ? labels->stride(0) : 0,
            .dtype = dtype_of("tvd", input),
            .target_dtype = dtype_of("tvd", target),
            .factor = reduce ? inverse(divisor) : 1.f,
            .ignore_index = ignore_index},
           host);
  return grad;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def(
      "tvd_forward(Tensor input, Tensor target, Tensor? labels, Tensor? scale, bool reduce, SymInt divisor, int ignore_index, bool "
      "want_grad)"
      " -> (Tensor loss, Tensor grad)");
  m.def(
      "tvd_backward(Tensor dy, Tensor input, Tensor target, Tensor? labels, Tensor? scale, bool reduce, SymInt divisor, int ignore_index)"
      " -> Tensor");
}

#define LIGER_REGISTER(key)                             \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {     \
    m.impl("tvd_forward", TORCH_BOX(&forward_torch));   \
    m.impl("tvd_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::tvd
