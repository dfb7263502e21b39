// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/fused_linear_cross_entropy/fused_linear_cross_entropy.h>
#include <liger_kernel/ops/fused_linear_jsd/plan.h>

namespace liger::fused_linear_jsd {
namespace {

using Optional = std::optional<Tensor>;

Head head_of(const char* whose, const Tensor& x, const Tensor& weight, const Optional& bias) {
  check_rows(kOp, whose, x);
  check_rows(kOp, whose, weight);
  check_devices(kOp, x, weight);
  LIGER_CHECK(weight.size(1) == x.size(1), kOp, ": the ", whose, " input has ", x.size(1), " columns, its weight ", weight.size(1),
              "; they must be equal");
  check_dtypes(kOp, (std::string("the ") + whose + " weight").c_str(), weight, "its input", x);
  if (bias) {
    check_devices(kOp, x, *bias);
    LIGER_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0) && bias->is_contiguous() && bias->scalar_type() == x.scalar_type(), kOp,
                ": the ", whose, " bias has ", bias->numel(), " elements, expected ", weight.size(0),
                " contiguous ones of the input's dtype");
  }
  return {.x = const_data(x),
          .weight = const_data(weight),
          .bias = bias ? const_data(*bias) : nullptr,
          .hidden = x.size(1),
          .vocab = weight.size(0),
          .x_stride = x.stride(0),
          .weight_stride = weight.stride(0)};
}

// teacher: the teacher's hidden states and its weight, or without a weight probabilities [rows, vocab].
// -> soft [rows] fp32, hard [rows] fp32, dx like the student's input, dw like its weight (fp32 if dw_fp32), db [vocab] fp32; those not
// wanted of 0 rows.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward_torch(const Tensor& x, const Tensor& weight, const Optional& bias,
                                                                 const Tensor& teacher, const Optional& teacher_weight,
                                                                 const Optional& teacher_bias, const Optional& target,
                                                                 const Optional& stats, int64_t valid_rows, int64_t logits_bytes,
                                                                 int64_t divergence, int64_t ignore_index, double beta, double temperature,
                                                                 double eps, double soft_scale, double hard_scale, bool want_hard,
                                                                 bool want_dx, bool want_dw, bool want_db, bool dw_fp32) {
  LIGER_CHECK(divergence >= 0 && divergence <= 2, kOp, ": there is no divergence number ", divergence);
  const auto kind = static_cast<Divergence>(divergence);
  const bool probabilities = kind == Divergence::kProbabilities;
  const Head student = head_of("student", x, weight, bias);
  const int64_t rows = x.size(0), hidden = x.size(1), vocab = weight.size(0);
  check_devices(kOp, x, teacher);
  LIGER_CHECK(probabilities != teacher_weight.has_value(), kOp, ": a teacher has a weight, probabilities have none");
  LIGER_CHECK(teacher.dim() == 2 && teacher.size(0) == rows, kOp, ": the teacher has ", teacher.size(0), " rows, the student ", rows,
              "; they must be equal");
  Head other{};
  if (probabilities) {
    check_rows(kOp, "probabilities", teacher);
    LIGER_CHECK(teacher.size(1) == vocab, kOp, ": there are ", teacher.size(1), " probabilities a row, the vocabulary has ", vocab,
                " entries; they must be equal");
    other.x = const_data(teacher), other.x_stride = teacher.stride(0), other.vocab = vocab;
  } else {
    other = head_of("teacher", teacher, *teacher_weight, teacher_bias);
    check_dtypes(kOp, "the teacher", teacher, "the student", x);
  }
  if (target) {
    check_devices(kOp, x, *target);
    LIGER_CHECK(target->dim() == 1 && target->size(0) == rows && target->scalar_type() == ScalarType::Long, kOp, ": there are ",
                target->numel(), " labels, expected ", rows, " of int64");
  }
  if (stats) {
    check_devices(kOp, x, *stats);
    LIGER_CHECK(stats->scalar_type() == ScalarType::Int && stats->numel() * 4 == int64_t{sizeof(LabelStats)} && stats->is_contiguous(), kOp,
                ": stats is not what cross_entropy_label_stats returns");
  }

  const TorchHost host(x);
  const DType dtype = dtype_of(kOp, x);
  Tensor soft = empty(x, {rows}, ScalarType::Float), hard = empty(x, {want_hard ? rows : 0}, ScalarType::Float);
  Tensor dx = empty(x, {want_dx ? rows : 0, hidden}, x.scalar_type()), db = empty(x, {want_db ? vocab : 0}, ScalarType::Float);
  ForwardArgs args{.student = student,
                   .teacher = other,
                   .target = target ? const_data<int64_t>(*target) : nullptr,
                   .stats = stats ? const_data<LabelStats>(*stats) : nullptr,
                   .soft = data<float>(soft),
                   .hard = want_hard ? data<float>(hard) : nullptr,
                   .dx = want_dx ? data(dx) : nullptr,
                   .dw = nullptr,
                   .db = want_db ? data<float>(db) : nullptr,
                   .rows = rows,
                   .target_stride = target ? target->stride(0) : 1,
                   .dtype = dtype,
                   .probability_dtype = probabilities ? dtype_of(kOp, teacher) : dtype,
                   .dw_result = dw_fp32 ? DType::kF32 : dtype,
                   .valid_rows = target ? valid_rows : -1,
                   .logits_bytes = logits_bytes,
                   .ignore_index = ignore_index,
                   .loss = {.divergence = kind,
                            .beta = static_cast<float>(beta),
                            .temperature = static_cast<float>(temperature),
                            .eps = static_cast<float>(eps),
                            .soft_scale = static_cast<float>(soft_scale),
                            .hard_scale = static_cast<float>(hard_scale)}};
  const DType result = args.dw_result, sum = choose(args, host.machine, want_dw).accumulator;
  const ScalarType result_type = dw_fp32 ? ScalarType::Float : x.scalar_type();
  const bool convert = want_dw && sum != result;
  Tensor dw = empty(x, {want_dw ? vocab : 0, hidden}, convert ? ScalarType::Float : result_type);
  args.dw = want_dw ? data(dw) : nullptr;
  forward(args, host);
  if (convert) {
    // The logits scratches are back in the allocator's hands by now, which gives the same memory out again for the result.
    Tensor rounded = empty(x, {vocab, hidden}, result_type);
    fused_linear_cross_entropy::move_rows({.src = const_data(dw),
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
  return {soft, hard, dx, dw, db};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def(
      "fused_linear_jsd_forward(Tensor x, Tensor weight, Tensor? bias, Tensor teacher, Tensor? teacher_weight, Tensor? teacher_bias, "
      "Tensor? target, Tensor? stats, int valid_rows, int logits_bytes, int divergence, int ignore_index, float beta, float temperature, "
      "float eps, float soft_scale, float hard_scale, bool want_hard, bool want_dx, bool want_dw, bool want_db, bool dw_fp32)"
      " -> (Tensor soft, Tensor hard, Tensor dx, Tensor dw, Tensor db)");
}

#define LIGER_REGISTER(key) \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) { m.impl("fused_linear_jsd_forward", TORCH_BOX(&forward_torch)); }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::fused_linear_jsd
