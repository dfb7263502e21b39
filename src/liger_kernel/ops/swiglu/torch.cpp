// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/swiglu/swiglu.h>

namespace liger::swiglu {
namespace {

// y [..., 2 cols] holds a in its left half, b in its right half: the shape of a.
Rows left_half(const Tensor& y) {
  Rows half = rows_of("swiglu", "y", y);
  LIGER_CHECK(half.cols % 2 == 0, "swiglu: y has ", half.cols, " columns, expected an even number");
  half.cols /= 2;
  return half;
}

// a, b as for rows_of -> c like a
Tensor forward_torch(const Tensor& a, const Tensor& b, double gate_multiplier, double down_multiplier) {
  const Rows rows_a = rows_of("swiglu", "a", a), rows_b = rows_like("swiglu", "b", b, "a", a);
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
           .dtype = dtype_of("swiglu", a),
           .gate_multiplier = static_cast<float>(gate_multiplier),
           .down_multiplier = static_cast<float>(down_multiplier)},
          host);
  return c;
}

// -> da, db like dc, of no elements when not wanted
std::tuple<Tensor, Tensor> backward_torch(const Tensor& dc, const Tensor& a, const Tensor& b, double gate_multiplier,
                                          double down_multiplier, bool want_da, bool want_db) {
  const Rows rows_a = rows_of("swiglu", "a", a), rows_b = rows_like("swiglu", "b", b, "a", a),
             rows_dc = rows_like("swiglu", "dc", dc, "a", a);
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
            .dtype = dtype_of("swiglu", a),
            .gate_multiplier = static_cast<float>(gate_multiplier),
            .down_multiplier = static_cast<float>(down_multiplier)},
           host);
  return {da, db};
}

// y [..., 2 cols] as for rows_of -> c [..., cols]
Tensor packed_forward_torch(const Tensor& y, double gate_multiplier, double down_multiplier) {
  const Rows half = left_half(y);
  const TorchHost host(y);
  std::vector<int64_t> shape(y.sizes().begin(), y.sizes().end());
  shape.back() = half.cols;
  Tensor c = empty(y, torch::headeronly::IntHeaderOnlyArrayRef(shape), y.scalar_type());
  const DType dtype = dtype_of("swiglu", y);
  forward({.a = const_data(y),
           .b = const_data<char>(y) + half.cols * size_of(dtype),
           .c = data(c),
           .rows = half.rows,
           .cols = half.cols,
           .a_stride = half.stride,
           .b_stride = half.stride,
           .c_stride = half.cols,
           .dtype = dtype,
           .gate_multiplier = static_cast<float>(gate_multiplier),
           .down_multiplier = static_cast<float>(down_multiplier)},
          host);
  return c;
}

void packed_backward(const Tensor& dc, const Tensor& y, const Tensor& dy, double gate_multiplier, double down_multiplier) {
  const Rows half = left_half(y), rows_dc = rows_of("swiglu", "dc", dc);
  check_devices("swiglu", y, dc);
  LIGER_CHECK(rows_dc.rows == half.rows && rows_dc.cols == half.cols, "swiglu: dc is ", rows_dc.rows, " x ", rows_dc.cols,
              ", half of y is ", half.rows, " x ", half.cols, "; they must be equal");
  check_dtypes("swiglu", "dc", dc, "y", y);
  const int64_t dy_stride = rows_of("swiglu", "dy", dy).stride;
  const DType dtype = dtype_of("swiglu", y);
  const TorchHost host(y);
  backward({.dc = const_data(dc),
            .a = const_data(y),
            .b = const_data<char>(y) + half.cols * size_of(dtype),
            .da = data(dy),
            .db = data<char>(dy) + half.cols * size_of(dtype),
            .rows = half.rows,
            .cols = half.cols,
            .dc_stride = rows_dc.stride,
            .a_stride = half.stride,
            .b_stride = half.stride,
            .da_stride = dy_stride,
            .db_stride = dy_stride,
            .dtype = dtype,
            .gate_multiplier = static_cast<float>(gate_multiplier),
            .down_multiplier = static_cast<float>(down_multiplier)},
           host);
}

// dc [..., cols], y [..., 2 cols] -> dy like y
Tensor packed_backward_torch(const Tensor& dc, const Tensor& y, double gate_multiplier, double down_multiplier) {
  Tensor dy = output_like(y);
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
