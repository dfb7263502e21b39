// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/fresh.h>
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/swiglu/swiglu.h>

namespace liger::swiglu {
namespace {

void check_like(const char* what, const Tensor& t, const Tensor& a) {
  check_rows("swiglu", what, t);
  check_devices("swiglu", a, t);
  LIGER_CHECK(t.size(0) == a.size(0) && t.size(1) == a.size(1), "swiglu: ", what, " is ", t.size(0), " x ", t.size(1), ", a is ", a.size(0),
              " x ", a.size(1));
  LIGER_CHECK(t.scalar_type() == a.scalar_type(), "swiglu: ", what, " and a differ in dtype");
}

// y [rows, 2 cols] holds a in its left half, b in its right half.
int64_t half(const Tensor& y) {
  check_rows("swiglu", "y", y);
  LIGER_CHECK(y.size(1) % 2 == 0, "swiglu: y has ", y.size(1), " columns, expected an even number");
  return y.size(1) / 2;
}
int64_t half_bytes(const Tensor& y) { return half(y) * size_of(dtype_of("swiglu", y)); }

// a, b [rows, cols] -> c like a
Tensor forward_torch(const Tensor& a, const Tensor& b, double gate_multiplier, double down_multiplier) {
  check_rows("swiglu", "a", a);
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
           .dtype = dtype_of("swiglu", a),
           .gate_multiplier = static_cast<float>(gate_multiplier),
           .down_multiplier = static_cast<float>(down_multiplier)},
          host);
  return c;
}

// -> da, db like a, with no rows when not wanted
std::tuple<Tensor, Tensor> backward_torch(const Tensor& dc, const Tensor& a, const Tensor& b, double gate_multiplier,
                                          double down_multiplier, bool want_da, bool want_db) {
  check_rows("swiglu", "a", a);
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
            .dtype = dtype_of("swiglu", a),
            .gate_multiplier = static_cast<float>(gate_multiplier),
            .down_multiplier = static_cast<float>(down_multiplier)},
           host);
  return {da, db};
}

// y [rows, 2 cols] -> c [rows, cols]
Tensor packed_forward_torch(const Tensor& y, double gate_multiplier, double down_multiplier) {
  const int64_t cols = half(y);
  const TorchHost host(y);
  Tensor c = fresh(y, {y.size(0), cols}, y.scalar_type());
  forward({.a = const_data(y),
           .b = const_data<char>(y) + half_bytes(y),
           .c = data(c),
           .rows = y.size(0),
           .cols = cols,
           .a_stride = y.stride(0),
           .b_stride = y.stride(0),
           .c_stride = cols,
           .dtype = dtype_of("swiglu", y),
           .gate_multiplier = static_cast<float>(gate_multiplier),
           .down_multiplier = static_cast<float>(down_multiplier)},
          host);
  return c;
}

void packed_backward(const Tensor& dc, const Tensor& y, const Tensor& dy, double gate_multiplier, double down_multiplier) {
  const int64_t cols = half(y);
  check_rows("swiglu", "dc", dc);
  check_devices("swiglu", y, dc);
  LIGER_CHECK(dc.size(0) == y.size(0) && dc.size(1) == cols, "swiglu: dc is ", dc.size(0), " x ", dc.size(1), ", expected ", y.size(0),
              " x ", cols);
  LIGER_CHECK(dc.scalar_type() == y.scalar_type(), "swiglu: dc and y differ in dtype");
  const TorchHost host(y);
  backward({.dc = const_data(dc),
            .a = const_data(y),
            .b = const_data<char>(y) + half_bytes(y),
            .da = data(dy),
            .db = data<char>(dy) + half_bytes(dy),
            .rows = y.size(0),
            .cols = cols,
            .dc_stride = dc.stride(0),
            .a_stride = y.stride(0),
            .b_stride = y.stride(0),
            .da_stride = dy.stride(0),
            .db_stride = dy.stride(0),
            .dtype = dtype_of("swiglu", y),
            .gate_multiplier = static_cast<float>(gate_multiplier),
            .down_multiplier = static_cast<float>(down_multiplier)},
           host);
}

// dc [rows, cols], y [rows, 2 cols] -> dy like y
Tensor packed_backward_torch(const Tensor& dc, const Tensor& y, double gate_multiplier, double down_multiplier) {
  half(y);
  Tensor dy = fresh(y, {y.size(0), y.size(1)}, y.scalar_type());
  packed_backward(dc, y, dy, gate_multiplier, down_multiplier);
  return dy;
}
// dy is written over y.
void packed_backward_in_place_torch(const Tensor& dc, const Tensor& y, double gate_multiplier, double down_multiplier) {
  packed_backward(dc, y, y, gate_multiplier, down_multiplier);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("swiglu_forward(Tensor a, Tensor b, float gate_multiplier, float down_multiplier) -> Tensor");
  m.def(
      "swiglu_backward(Tensor dc, Tensor a, Tensor b, float gate_multiplier, float down_multiplier, bool want_da, bool want_db)"
      " -> (Tensor da, Tensor db)");
  m.def("swiglu_packed_forward(Tensor y, float gate_multiplier, float down_multiplier) -> Tensor");
  m.def("swiglu_packed_backward(Tensor dc, Tensor y, float gate_multiplier, float down_multiplier) -> Tensor");
  m.def("swiglu_packed_backward_(Tensor dc, Tensor(a!) y, float gate_multiplier, float down_multiplier) -> ()");
}

#define LIGER_REGISTER(key)                                                        \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {                                \
    m.impl("swiglu_forward", TORCH_BOX(&forward_torch));                           \
    m.impl("swiglu_backward", TORCH_BOX(&backward_torch));                         \
    m.impl("swiglu_packed_forward", TORCH_BOX(&packed_forward_torch));             \
    m.impl("swiglu_packed_backward", TORCH_BOX(&packed_backward_torch));           \
    m.impl("swiglu_packed_backward_", TORCH_BOX(&packed_backward_in_place_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::swiglu
