// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/fused_moe/fused_moe.h>

namespace liger::fused_moe {
namespace {

constexpr const char* kOp = "fused_moe";

void check_whole(const char* what, const Tensor& t, int64_t dims) {
  LIGER_CHECK(t.dim() == dims && t.is_contiguous(), kOp, ": ", what, " has ", t.dim(), " dimensions, expected ", dims, " without gaps");
}
void check_ints(const char* what, const Tensor& t, int64_t dims, int64_t size) {
  check_whole(what, t, dims);
  LIGER_CHECK(t.scalar_type() == ScalarType::Int && (size < 0 || t.numel() == size), kOp, ": ", what, " has ", t.numel(),
              " elements, expected ", size, " of int32");
}
void check_starts(const Tensor& starts) {
  check_ints("starts", starts, 1, -1);
  LIGER_CHECK(starts.numel() > 1, kOp, ": starts has ", starts.numel(), " elements, expected one more than there are experts");
}
void check_weight(const Tensor& weight, int64_t size) {
  LIGER_CHECK(weight.is_contiguous() && weight.scalar_type() == ScalarType::Float && weight.numel() == size, kOp, ": weight has ",
              weight.numel(), " elements, expected ", size, " contiguous ones of fp32");
}

// index [tokens, top_k] int32 or int64 -> starts [experts + 1], token [tokens top_k], order [tokens top_k], place [tokens, top_k]
std::tuple<Tensor, Tensor, Tensor, Tensor> route_torch(const Tensor& index, int64_t experts) {
  check_whole("index", index, 2);
  const bool wide = index.scalar_type() == ScalarType::Long;
  LIGER_CHECK(wide || index.scalar_type() == ScalarType::Int, kOp, ": index is neither int32 nor int64; cast it");
  const int64_t tokens = index.size(0), top_k = index.size(1), slots = tokens * top_k;
  const TorchHost host(index);
  Tensor starts = empty(index, {experts + 1}, ScalarType::Int), token = empty(index, {slots}, ScalarType::Int);
  Tensor order = empty(index, {slots}, ScalarType::Int), place = empty(index, {tokens, top_k}, ScalarType::Int);
  route({.index = const_data(index),
         .starts = data<int32_t>(starts),
         .token = data<int32_t>(token),
         .order = data<int32_t>(order),
         .place = data<int32_t>(place),
         .slots = slots,
         .experts = experts,
         .top_k = top_k,
         .wide = wide},
        host);
  return {starts, token, order, place};
}

// y [slots, cols], place [tokens, top_k], weight like place in fp32, or none -> [tokens, cols]
Tensor combine_torch(const Tensor& y, const Tensor& place, const Tensor& starts, const std::optional<Tensor>& weight) {
  check_whole("y", y, 2);
  check_ints("place", place, 2, y.size(0));
  check_starts(starts);
  check_devices(kOp, y, place, starts);
  if (weight) check_weight(*weight, place.numel()), check_devices(kOp, y, *weight);
  const TorchHost host(y);
  Tensor out = empty(y, {place.size(0), y.size(1)}, y.scalar_type());
  combine({.y = const_data(y),
           .place = const_data<int32_t>(place),
           .starts = const_data<int32_t>(starts),
           .weight = weight ? const_data<float>(*weight) : nullptr,
           .out = data(out),
           .tokens = place.size(0),
           .top_k = place.size(1),
           .cols = y.size(1),
           .experts = starts.numel() - 1,
           .dtype = dtype_of(kOp, y)},
          host);
  return out;
}

// da [slots, cols] or none, h [slots, 2 cols], weight fp32 -> dh like h, weight a [slots, cols], dweight like weight; without elements
// when not wanted
std::tuple<Tensor, Tensor, Tensor> gate_gradient_torch(const std::optional<Tensor>& da, const Tensor& h, const Tensor& order,
                                                       const Tensor& starts, const Tensor& weight, bool want_dh, bool want_weighted,
                                                       bool want_dweight) {
  check_whole("h", h, 2);
  const int64_t slots = h.size(0), cols = h.size(1) / 2;
  check_ints("order", order, 1, slots);
  check_starts(starts);
  check_weight(weight, slots);
  check_devices(kOp, h, order, starts, weight);
  LIGER_CHECK(da || !(want_dh || want_dweight), kOp, ": dh and dweight need da");
  if (da) {
    check_whole("da", *da, 2);
    check_devices(kOp, h, *da);
    LIGER_CHECK(da->size(0) == slots && da->size(1) == cols && da->scalar_type() == h.scalar_type(), kOp, ": da is ", da->size(0), " x ",
                da->size(1), ", expected ", slots, " x ", cols, " of h's dtype");
  }
  const TorchHost host(h);
  Tensor dh = output_like(h, want_dh), weighted = empty(h, {want_weighted ? slots : 0, cols}, h.scalar_type());
  Tensor dweight = output_like(weight, want_dweight);
  gate_gradient({.da = da ? const_data(*da) : nullptr,
                 .h = const_data(h),
                 .order = const_data<int32_t>(order),
                 .starts = const_data<int32_t>(starts),
                 .weight = const_data<float>(weight),
                 .dh = want_dh ? data(dh) : nullptr,
                 .weighted = want_weighted ? data(weighted) : nullptr,
                 .dweight = want_dweight ? data<float>(dweight) : nullptr,
                 .slots = slots,
                 .cols = cols,
                 .experts = starts.numel() - 1,
                 .dtype = dtype_of(kOp, h)},
                host);
  return {dh, weighted, dweight};
}

// x [slots, k], w [experts, n, k] (transpose) or [experts, k, n], any strides with contiguous rows -> [slots, n]
Tensor project_torch(const Tensor& x, const Tensor& w, const Tensor& starts, bool transpose) {
  check_whole("x", x, 2);
  check_starts(starts);
  check_devices(kOp, x, w, starts);
  const int64_t experts = starts.numel() - 1, inner = transpose ? 2 : 1;
  LIGER_CHECK(w.dim() == 3 && w.size(0) == experts && (w.size(2) <= 1 || w.stride(2) == 1), kOp, ": the projection has ", w.dim(),
              " dimensions, expected [", experts, ", rows, columns] with contiguous rows");
  LIGER_CHECK(w.size(inner) == x.size(1), kOp, ": x has ", x.size(1), " columns, the projection ", w.size(inner), "; they must be equal");
  check_dtypes(kOp, "the projection", w, "x", x);
  const TorchHost host(x);
  const int64_t n = w.size(3 - inner);
  Tensor y = empty(x, {x.size(0), n}, x.scalar_type());
  project({.x = const_data(x),
           .w = const_data(w),
           .y = data(y),
           .starts = const_data<int32_t>(starts),
           .slots = x.size(0),
           .experts = experts,
           .n = n,
           .k = x.size(1),
           .expert_stride = w.stride(0),
           .row_stride = w.stride(1),
           .transpose = transpose,
           .dtype = dtype_of(kOp, x)},
          host);
  return y;
}

// a [slots, m], b [slots, n] -> [experts, m, n]
Tensor weight_gradient_torch(const Tensor& a, const Tensor& b, const Tensor& starts) {
  check_whole("a", a, 2);
  check_whole("b", b, 2);
  check_starts(starts);
  check_devices(kOp, a, b, starts);
  LIGER_CHECK(a.size(0) == b.size(0) && a.scalar_type() == b.scalar_type(), kOp, ": a has ", a.size(0), " rows, b ", b.size(0),
              "; they must be equal, and their dtypes too");
  const TorchHost host(a);
  const int64_t experts = starts.numel() - 1;
  Tensor out = empty(a, {experts, a.size(1), b.size(1)}, a.scalar_type());
  weight_gradient({.a = const_data(a),
                   .b = const_data(b),
                   .out = data(out),
                   .starts = const_data<int32_t>(starts),
                   .experts = experts,
                   .m = a.size(1),
                   .n = b.size(1),
                   .dtype = dtype_of(kOp, a)},
                  host);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("fused_moe_route(Tensor index, int experts) -> (Tensor starts, Tensor token, Tensor order, Tensor place)");
  m.def("fused_moe_combine(Tensor y, Tensor place, Tensor starts, Tensor? weight) -> Tensor");
  m.def(
      "fused_moe_gate_gradient(Tensor? da, Tensor h, Tensor order, Tensor starts, Tensor weight, bool want_dh, bool want_weighted, "
      "bool want_dweight) -> (Tensor dh, Tensor weighted, Tensor dweight)");
  m.def("fused_moe_project(Tensor x, Tensor w, Tensor starts, bool transpose) -> Tensor");
  m.def("fused_moe_weight_gradient(Tensor a, Tensor b, Tensor starts) -> Tensor");
}

#define LIGER_REGISTER(key)                                                 \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {                         \
    m.impl("fused_moe_route", TORCH_BOX(&route_torch));                     \
    m.impl("fused_moe_combine", TORCH_BOX(&combine_torch));                 \
    m.impl("fused_moe_gate_gradient", TORCH_BOX(&gate_gradient_torch));     \
    m.impl("fused_moe_project", TORCH_BOX(&project_torch));                 \
    m.impl("fused_moe_weight_gradient", TORCH_BOX(&weight_gradient_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::fused_moe
