// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/dyt/dyt.h>

namespace liger::dyt {
namespace {

using Optional = std::optional<Tensor>;

void check_columns(const Tensor& x, int64_t cols, const char* what, const Tensor& t) {
  check_devices("dyt", x, t);
  LIGER_CHECK(t.dim() == 1 && t.size(0) == cols, "dyt: ", what, " has ", t.numel(), " elements in ", t.dim(), " dimensions, x has ", cols,
              " columns; they must be equal");
  LIGER_CHECK(t.is_contiguous(), "dyt: ", what, " is not contiguous");
}
void check_alpha(const Tensor& x, const Tensor& alpha) {
  check_devices("dyt", x, alpha);
  LIGER_CHECK(alpha.numel() == 1, "dyt: alpha has ", alpha.numel(), " elements, expected 1");
}

// x as for rows_of, alpha of one element, gamma [cols], beta [cols] or none -> y like x
Tensor forward_torch(const Tensor& x, const Tensor& alpha, const Tensor& gamma, const Optional& beta) {
  const Rows shape = rows_of("dyt", "x", x);
  check_alpha(x, alpha);
  check_columns(x, shape.cols, "gamma", gamma);
  if (beta) check_columns(x, shape.cols, "beta", *beta);
  const TorchHost host(x);
  Tensor y = output_like(x);
  forward({.x = const_data(x),
           .alpha = const_data(alpha),
           .gamma = const_data(gamma),
           .beta = beta ? const_data(*beta) : nullptr,
           .y = data(y),
           .rows = shape.rows,
           .cols = shape.cols,
           .x_stride = shape.stride,
           .y_stride = shape.cols,
           .dtype = dtype_of("dyt", x),
           .alpha_dtype = dtype_of("dyt", alpha),
           .gamma_dtype = dtype_of("dyt", gamma),
           .beta_dtype = dtype_of("dyt", beta ? *beta : gamma)},
          host);
  return y;
}

// -> dx like dy, dalpha [1], dgamma and dbeta [cols], of their parameters' dtypes; each of no elements when not wanted
std::tuple<Tensor, Tensor, Tensor, Tensor> backward_torch(const Tensor& dy, const Tensor& x, const Tensor& alpha, const Tensor& gamma,
                                                          const Optional& beta, bool want_dx, bool want_dalpha, bool want_dgamma,
                                                          bool want_dbeta) {
  const Rows shape = rows_of("dyt", "x", x), dy_shape = rows_like("dyt", "dy", dy, "x", x);
  check_alpha(x, alpha);
  check_columns(x, shape.cols, "gamma", gamma);
  if (beta) check_columns(x, shape.cols, "beta", *beta);
  check_devices("dyt", x, dy);
  LIGER_CHECK(beta || !want_dbeta, "dyt: a gradient is wanted of a beta that is not given");
  const TorchHost host(x);
  const Tensor& beta_like = beta ? *beta : gamma;
  Tensor dx = output_like(dy, want_dx);
  Tensor dalpha = empty(x, {want_dalpha ? 1 : 0}, alpha.scalar_type());
  Tensor dgamma = empty(x, {want_dgamma ? shape.cols : 0}, gamma.scalar_type());
  Tensor dbeta = empty(x, {want_dbeta ? shape.cols : 0}, beta_like.scalar_type());
  backward({.dy = const_data(dy),
            .x = const_data(x),
            .alpha = const_data(alpha),
            .gamma = const_data(gamma),
            .dx = want_dx ? data(dx) : nullptr,
            .dalpha = want_dalpha ? data(dalpha) : nullptr,
            .dgamma = want_dgamma ? data(dgamma) : nullptr,
            .dbeta = want_dbeta ? data(dbeta) : nullptr,
            .rows = shape.rows,
            .cols = shape.cols,
            .dy_stride = dy_shape.stride,
            .x_stride = shape.stride,
            .dx_stride = shape.cols,
            .dtype = dtype_of("dyt", x),
            .alpha_dtype = dtype_of("dyt", alpha),
            .gamma_dtype = dtype_of("dyt", gamma),
            .beta_dtype = dtype_of("dyt", beta_like)},
           host);
  return {dx, dalpha, dgamma, dbeta};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("dyt_forward(Tensor x, Tensor alpha, Tensor gamma, Tensor? beta) -> Tensor");
  m.def(
      "dyt_backward(Tensor dy, Tensor x, Tensor alpha, Tensor gamma, Tensor? beta, bool want_dx, bool want_dalpha, bool want_dgamma,"
      " bool want_dbeta) -> (Tensor dx, Tensor dalpha, Tensor dgamma, Tensor dbeta)");
}

#define LIGER_REGISTER(key)                             \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {     \
    m.impl("dyt_forward", TORCH_BOX(&forward_torch));   \
    m.impl("dyt_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::dyt
