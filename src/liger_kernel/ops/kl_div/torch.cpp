// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/kl_div/kl_div.h>

namespace liger::kl_div {
namespace {

float inverse(int64_t divisor) { return static_cast<float>(1. / static_cast<double>(divisor > 0 ? divisor : 1)); }

// input, target as for rows_of -> loss fp32, [1] sum / divisor or, when not reduced, like input; its gradient, like input or of no elements
std::tuple<Tensor, Tensor> forward_torch(const Tensor& input, const Tensor& target, bool reduce, int64_t divisor, bool log_target,
                                         double eps, bool want_grad) {
  const Rows shape = rows_of("kl_div", "input", input), target_shape = rows_like("kl_div", "target", target, "input", input, true);
  LIGER_CHECK(!want_grad || reduce, "kl_div: no gradient is formed in forward without a reduction");
  const TorchHost host(input);
  Tensor loss = reduce ? empty(input, {1}, ScalarType::Float) : empty(input, input.sizes(), ScalarType::Float);
  Tensor grad = output_like(input, want_grad);
  forward({.input = const_data(input),
           .target = const_data(target),
           .loss = reduce ? nullptr : data<float>(loss),
           .total = reduce ? data<float>(loss) : nullptr,
           .grad = want_grad ? data(grad) : nullptr,
           .rows = shape.rows,
           .cols = shape.cols,
           .input_stride = shape.stride,
           .target_stride = target_shape.stride,
           .loss_stride = shape.cols,
           .grad_stride = shape.cols,
           .dtype = dtype_of("kl_div", input),
           .target_dtype = dtype_of("kl_div", target),
           .factor = reduce ? inverse(divisor) : 1.f,
           .log_target = log_target,
           .eps = static_cast<float>(eps)},
          host);
  return {loss, grad};
}

// dy fp32: one number when the loss was reduced, else as for rows_of; target as for rows_of -> gradient of target's shape, of `like`'s
// dtype
Tensor backward_torch(const Tensor& dy, const Tensor& target, const Tensor& like, bool reduce, int64_t divisor, bool log_target) {
  const Rows shape = rows_of("kl_div", "target", target);
  check_devices("kl_div", target, dy);
  LIGER_CHECK(dy.scalar_type() == ScalarType::Float, "kl_div: dy is not fp32; cast it");
  LIGER_CHECK(!reduce || dy.numel() == 1, "kl_div: dy has ", dy.numel(), " elements, the loss is one number");
  const TorchHost host(target);
  Tensor grad = empty(target, target.sizes(), like.scalar_type());
  backward({.dy = const_data<float>(dy),
            .of_total = reduce,
            .target = const_data(target),
            .grad = data(grad),
            .rows = shape.rows,
            .cols = shape.cols,
            .dy_stride = reduce ? 0 : rows_like("kl_div", "dy", dy, "target", target, true).stride,
            .target_stride = shape.stride,
            .grad_stride = shape.cols,
            .dtype = dtype_of("kl_div", like),
            .target_dtype = dtype_of("kl_div", target),
            .factor = reduce ? inverse(divisor) : 1.f,
            .log_target = log_target},
           host);
  return grad;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def(
      "kl_div_forward(Tensor input, Tensor target, bool reduce, SymInt divisor, bool log_target, float eps, bool want_grad)"
      " -> (Tensor loss, Tensor grad)");
  m.def("kl_div_backward(Tensor dy, Tensor target, Tensor like, bool reduce, SymInt divisor, bool log_target) -> Tensor");
}

#define LIGER_REGISTER(key)                                \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {        \
    m.impl("kl_div_forward", TORCH_BOX(&forward_torch));   \
    m.impl("kl_div_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::kl_div
