// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/group_norm/group_norm.h>

namespace liger::group_norm {
namespace {

void check_contiguous(const char* what, const Tensor& t) { LIGER_CHECK(t.is_contiguous(), "group_norm: ", what, " is not contiguous"); }
// Elements of a plane.
int64_t check_planes(const Tensor& x, int64_t groups) {
  LIGER_CHECK(x.dim() >= 3, "group_norm: x has ", x.dim(), " dimensions, expected batch, channels and at least one more");
  check_contiguous("x", x);
  LIGER_CHECK(groups > 0 && x.size(1) % groups == 0, "group_norm: ", x.size(1), " channels do not divide into ", groups, " groups");
  int64_t spatial = 1;
  for (int64_t d = 2; d < x.dim(); ++d) spatial *= x.size(d);
  return spatial;
}
void check_channels(const Tensor& x, const char* what, const Tensor& t) {
  check_devices("group_norm", x, t);
  LIGER_CHECK(t.dim() == 1 && t.size(0) == x.size(1), "group_norm: ", what, " has ", t.numel(), " elements in ", t.dim(),
              " dimensions, x has ", x.size(1), " channels; they must be equal");
  check_contiguous(what, t);
}

// x [batch, channels, ...], weight and bias [channels] -> y like x; mean and rstd [batch, groups] fp32
std::tuple<Tensor, Tensor, Tensor> forward_torch(const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t groups, double eps) {
  const int64_t spatial = check_planes(x, groups);
  check_channels(x, "weight", weight);
  check_channels(x, "bias", bias);
  const TorchHost host(x);
  Tensor y = output_like(x);
  Tensor mean = empty(x, {x.size(0), groups}, ScalarType::Float);
  Tensor rstd = empty(x, {x.size(0), groups}, ScalarType::Float);
  forward({.x = const_data(x),
           .weight = const_data(weight),
           .bias = const_data(bias),
           .y = data(y),
           .mean = data<float>(mean),
           .rstd = data<float>(rstd),
           .batch = x.size(0),
           .channels = x.size(1),
           .spatial = spatial,
           .groups = groups,
           .dtype = dtype_of("group_norm", x),
           .weight_dtype = dtype_of("group_norm", weight),
           .bias_dtype = dtype_of("group_norm", bias),
           .eps = static_cast<float>(eps)},
          host);
  return {y, mean, rstd};
}

// -> dx like x, dw like weight, db like bias; each of no elements when not wanted
std::tuple<Tensor, Tensor, Tensor> backward_torch(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                  const Tensor& mean, const Tensor& rstd, int64_t groups, bool want_dx, bool want_dw,
                                                  bool want_db) {
  const int64_t spatial = check_planes(x, groups);
  check_channels(x, "weight", weight);
  check_channels(x, "bias", bias);
  check_devices("group_norm", x, dy, mean, rstd);
  check_contiguous("dy", dy);
  LIGER_CHECK(dy.numel() == x.numel() && dy.dim() == x.dim(), "group_norm: dy has ", dy.numel(), " elements, x has ", x.numel(),
              "; their shapes must be equal");
  check_dtypes("group_norm", "dy", dy, "x", x);
  for (const Tensor* t : {&mean, &rstd}) {
    LIGER_CHECK(t->scalar_type() == ScalarType::Float && t->is_contiguous() && t->numel() == x.size(0) * groups,
                "group_norm: mean and rstd must be those of the forward: fp32, contiguous, ", x.size(0), " x ", groups);
  }
  const TorchHost host(x);
  Tensor dx = output_like(x, want_dx), dw = output_like(weight, want_dw), db = output_like(bias, want_db);
  backward({.dy = const_data(dy),
            .x = const_data(x),
            .weight = const_data(weight),
            .mean = const_data<float>(mean),
            .rstd = const_data<float>(rstd),
            .dx = want_dx ? data(dx) : nullptr,
            .dw = want_dw ? data(dw) : nullptr,
            .db = want_db ? data(db) : nullptr,
            .batch = x.size(0),
            .channels = x.size(1),
            .spatial = spatial,
            .groups = groups,
            .dtype = dtype_of("group_norm", x),
            .weight_dtype = dtype_of("group_norm", weight),
            .bias_dtype = dtype_of("group_norm", bias)},
           host);
  return {dx, dw, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("group_norm_forward(Tensor x, Tensor weight, Tensor bias, int groups, float eps) -> (Tensor y, Tensor mean, Tensor rstd)");
  m.def(
      "group_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor rstd, int groups, bool want_dx,"
      " bool want_dw, bool want_db) -> (Tensor dx, Tensor dw, Tensor db)");
}

#define LIGER_REGISTER(key)                                    \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {            \
    m.impl("group_norm_forward", TORCH_BOX(&forward_torch));   \
    m.impl("group_norm_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::group_norm
