// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/fused_linear_cross_entropy/plan.h>

namespace liger::fused_linear_cross_entropy {
namespace {

constexpr const char* kOp = "fused_linear_cross_entropy";
using cross_entropy::LabelStats;

void check_vector(const Tensor& x, const std::optional<Tensor>& t, const char* what, int64_t size, ScalarType dtype,
                  const char* dtype_name) {
  if (!t) return;
  check_devices(kOp, x, *t);
  LIGER_CHECK(t->dim() == 1 && t->size(0) == size && t->is_contiguous() && t->scalar_type() == dtype, kOp, ": ", what, " has ", t->numel(),
              " elements, expected ", size, " contiguous ones of ", dtype_name);
}

void check(const Tensor& x, const Tensor& weight, const Tensor& target, const std::optional<Tensor>& bias,
           const std::optional<Tensor>& class_weight, const Tensor& stats, const std::optional<Tensor>& row_scale) {
  check_rows(kOp, "x", x);
  check_rows(kOp, "weight", weight);
  LIGER_CHECK(weight.size(1) == x.size(1), kOp, ": x has ", x.size(1), " columns, weight has ", weight.size(1), "; they must be equal");
  check_dtypes(kOp, "weight", weight, "x", x);
  check_devices(kOp, x, weight, target, stats);
  LIGER_CHECK(target.dim() == 1 && target.size(0) == x.size(0), kOp, ": target has ", target.numel(), " elements, x has ", x.size(0),
              " rows");
  LIGER_CHECK(target.scalar_type() == ScalarType::Long, kOp, ": target is not int64; pass class indices, target.long()");
  LIGER_CHECK(stats.scalar_type() == ScalarType::Int && stats.numel() * 4 == int64_t{sizeof(LabelStats)} && stats.is_contiguous(), kOp,
              ": stats is not what cross_entropy_label_stats returns");
  check_vector(x, bias, "bias", weight.size(0), x.scalar_type(), "x's dtype");
  check_vector(x, class_weight, "class weight", weight.size(0), ScalarType::Float, "fp32");
  check_vector(x, row_scale, "row_scale", x.size(0), ScalarType::Float, "fp32");
}

// loss [rows] fp32; z_loss, hit [rows] fp32 and prediction [rows] int64, empty when not wanted; dx like x, dw like weight (fp32 if
// dw_fp32), db [vocab] fp32, empty (0 rows) when not wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> forward_torch(
    const Tensor& x, const Tensor& weight, const Tensor& target, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& class_weight, const Tensor& stats, const std::optional<Tensor>& row_scale, int64_t valid_rows,
    int64_t logits_bytes, int64_t chunk_mem, int64_t ignore_index, double label_smoothing, double lse_square_scale, double softcap,
    double logit_scale, bool mean, bool token_scaling, bool want_z, bool want_hit, bool want_prediction, bool want_dx, bool want_dw,
    bool want_db, bool dw_fp32, bool low_accumulation) {
  check(x, weight, target, bias, class_weight, stats, row_scale);
  const TorchHost host(x);
  const int64_t rows = x.size(0), hidden = x.size(1), vocab = weight.size(0);
  const DType dtype = dtype_of(kOp, x);
  Tensor loss = empty(x, {rows}, ScalarType::Float), z_loss = empty(x, {want_z ? rows : 0}, ScalarType::Float);
  Tensor hit = empty(x, {want_hit ? rows : 0}, ScalarType::Float), prediction = empty(x, {want_prediction ? rows : 0}, ScalarType::Long);
  Tensor dx = empty(x, {want_dx ? rows : 0, hidden}, x.scalar_type()), db = empty(x, {want_db ? vocab : 0}, ScalarType::Float);
  ForwardArgs args{.x = const_data(x),
                   .weight = const_data(weight),
                   .bias = bias ? const_data(*bias) : nullptr,
                   .target = const_data<int64_t>(target),
                   .class_weight = class_weight ? const_data<float>(*class_weight) : nullptr,
                   .stats = const_data<LabelStats>(stats),
                   .row_scale = row_scale ? const_data<float>(*row_scale) : nullptr,
                   .loss = data<float>(loss),
                   .z_loss = want_z ? data<float>(z_loss) : nullptr,
                   .hit = want_hit ? data<float>(hit) : nullptr,
                   .prediction = want_prediction ? data<int64_t>(prediction) : nullptr,
                   .dx = want_dx ? data(dx) : nullptr,
                   .dw = nullptr,
                   .db = want_db ? data<float>(db) : nullptr,
                   .rows = rows,
                   .hidden = hidden,
                   .vocab = vocab,
                   .x_stride = x.stride(0),
                   .weight_stride = weight.stride(0),
                   .target_stride = target.stride(0),
                   .dtype = dtype,
                   .dw_result = dw_fp32 ? DType::kF32 : dtype,
                   .low_accumulation = low_accumulation,
                   .valid_rows = valid_rows,
                   .logits_bytes = logits_bytes,
                   .chunk_mem = chunk_mem,
                   .ignore_index = ignore_index,
                   .label_smoothing = static_cast<float>(label_smoothing),
                   .lse_square_scale = static_cast<float>(lse_square_scale),
                   .softcap = static_cast<float>(softcap),
                   .logit_scale = static_cast<float>(logit_scale),
                   .mean = mean,
                   .token_scaling = token_scaling};
  const DType result = args.dw_result, sum = choose(args, host.machine, want_dw).accumulator;
  const ScalarType result_type = dw_fp32 ? ScalarType::Float : x.scalar_type();
  const bool convert = want_dw && sum != result;
  Tensor dw = empty(x, {want_dw ? vocab : 0, hidden}, convert ? ScalarType::Float : result_type);
  args.dw = want_dw ? data(dw) : nullptr;
  forward(args, host);
  if (convert) {
    // The logits scratch is back in the allocator's hands by now, which gives the same memory out again for the result: no more is
    // held at once than the sum and the larger of the two.
    Tensor rounded = empty(x, {vocab, hidden}, result_type);
    move_rows({.src = const_data(dw),
               .dst = data(rounded),
               .rows = vocab,
               .cols = hidden,
               .src_stride = hidden,
               .dst_stride = hidden,
               .src_dtype = DType::kF32,
               .dst_dtype = result},
              host);
    dw = rounded;
  }
  return {loss, z_loss, hit, prediction, dx, dw, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def(
      "fused_linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, Tensor stats, "
      "Tensor? row_scale, int valid_rows, int logits_bytes, int chunk_mem, int ignore_index, float label_smoothing, "
      "float lse_square_scale, float softcap, float logit_scale, bool mean, bool token_scaling, bool want_z, bool want_hit, "
      "bool want_prediction, bool want_dx, bool want_dw, bool want_db, bool dw_fp32, bool low_accumulation)"
      " -> (Tensor loss, Tensor z_loss, Tensor hit, Tensor prediction, Tensor dx, Tensor dw, Tensor db)");
}

#define LIGER_REGISTER(key) \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) { m.impl("fused_linear_cross_entropy_forward", TORCH_BOX(&forward_torch)); }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::fused_linear_cross_entropy
