// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/geglu/geglu.h>

namespace liger::geglu {
namespace {

// a, b as for rows_of -> c like a
Tensor forward_torch(const Tensor& a, const Tensor& b, bool exact) {
  const Rows rows_a = rows_of("geglu", "a", a), rows_b = rows_like("geglu", "b", b, "a", a);
  const TorchHost host(a);
  Tensor c = output_like(a);
  forward({.a = const_data(a),
           .b = const_data(b),
           .c = data(c),
           .rows = rows_a.rows,
           .cols = rows_a.cols,
           .a_stride = rows_a.stride,
           .b_stride = rows_b.stride,
           .c_stride = rows_a.cols,
           .dtype = dtype_of("geglu", a),
           .exact = exact},
          host);
  return c;
}

// -> da, db like dc, of no elements when not wanted
std::tuple<Tensor, Tensor> backward_torch(const Tensor& dc, const Tensor& a, const Tensor& b, bool exact, bool want_da, bool want_db) {
  const Rows rows_a = rows_of("geglu", "a", a), rows_b = rows_like("geglu", "b", b, "a", a), rows_dc = rows_like("geglu", "dc", dc, "a", a);
  const TorchHost host(a);
  Tensor da = output_like(dc, want_da), db = output_like(dc, want_db);
  backward({.dc = const_data(dc),
            .a = const_data(a),
            .b = const_data(b),
            .da = want_da ? data(da) : nullptr,
            .db = want_db ? data(db) : nullptr,
            .rows = rows_a.rows,
            .cols = rows_a.cols,
            .dc_stride = rows_dc.stride,
            .a_stride = rows_a.stride,
            .b_stride = rows_b.stride,
            .da_stride = rows_a.cols,
            .db_stride = rows_a.cols,
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
