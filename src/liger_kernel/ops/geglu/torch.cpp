// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/fresh.h>
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/geglu/geglu.h>

namespace liger::geglu {
namespace {

void check_like(const char* what, const Tensor& t, const Tensor& a) {
  check_rows("geglu", what, t);
  check_devices("geglu", a, t);
  LIGER_CHECK(t.size(0) == a.size(0) && t.size(1) == a.size(1), "geglu: ", what, " is ", t.size(0), " x ", t.size(1), ", a is ", a.size(0),
              " x ", a.size(1));
  LIGER_CHECK(t.scalar_type() == a.scalar_type(), "geglu: ", what, " and a differ in dtype");
}

// a, b [rows, cols] -> c like a
Tensor forward_torch(const Tensor& a, const Tensor& b, bool exact) {
  check_rows("geglu", "a", a);
  check_like("b", b, a);
  const TorchHost host(a);
  Tensor c = fresh(a, {a.size(0), a.size(1)}, a.scalar_type());
  forward({.a = const_data(a),
           .b = const_data(b),
           .c = data(c),
           .rows = a.size(0),
           .cols = a.size(1),
           .a_stride = a.stride(0),
           .b_stride = b.stride(0),
           .c_stride = a.size(1),
           .dtype = dtype_of("geglu", a),
           .exact = exact},
          host);
  return c;
}

// -> da, db like a, with no rows when not wanted
std::tuple<Tensor, Tensor> backward_torch(const Tensor& dc, const Tensor& a, const Tensor& b, bool exact, bool want_da, bool want_db) {
  check_rows("geglu", "a", a);
  check_like("b", b, a);
  check_like("dc", dc, a);
  const TorchHost host(a);
  Tensor da = fresh(a, {want_da ? a.size(0) : 0, a.size(1)}, a.scalar_type());
  Tensor db = fresh(a, {want_db ? a.size(0) : 0, a.size(1)}, a.scalar_type());
  backward({.dc = const_data(dc),
            .a = const_data(a),
            .b = const_data(b),
            .da = want_da ? data(da) : nullptr,
            .db = want_db ? data(db) : nullptr,
            .rows = a.size(0),
            .cols = a.size(1),
            .dc_stride = dc.stride(0),
            .a_stride = a.stride(0),
            .b_stride = b.stride(0),
            .da_stride = a.size(1),
            .db_stride = a.size(1),
            .dtype = dtype_of("geglu", a),
            .exact = exact},
           host);
  return {da, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("geglu_forward(Tensor a, Tensor b, bool exact) -> Tensor");
  m.def("geglu_backward(Tensor dc, Tensor a, Tensor b, bool exact, bool want_da, bool want_db) -> (Tensor da, Tensor db)");
}

#define LIGER_REGISTER(key)                               \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {       \
    m.impl("geglu_forward", TORCH_BOX(&forward_torch));   \
    m.impl("geglu_backward", TORCH_BOX(&backward_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::geglu
