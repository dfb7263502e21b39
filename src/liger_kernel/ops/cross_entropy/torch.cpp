// The only file of this op that knows torch: schema, checks, allocation.
//
// LabelStats travels as an int32 tensor of 6 elements: fields 0, 1 and 5 hold the bits of fp32 numbers.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/cross_entropy/cross_entropy.h>

namespace liger::cross_entropy {
namespace {

constexpr int64_t kStatsSize = sizeof(LabelStats) / sizeof(int32_t);
static_assert(sizeof(LabelStats) == 24);

void check_target(const Tensor& target) {
  LIGER_CHECK(target.dim() == 1, "cross_entropy: target has ", target.dim(), " dimensions, expected [rows]");
  LIGER_CHECK(target.scalar_type() == ScalarType::Long, "cross_entropy: target is not int64; pass class indices, target.long()");
}

void check_stats(const Tensor& stats) {
  LIGER_CHECK(stats.scalar_type() == ScalarType::Int && stats.numel() == kStatsSize && stats.is_contiguous(),
              "cross_entropy: stats is not what cross_entropy_label_stats returns");
}

void check_class_weight(const std::optional<Tensor>& weight, int64_t vocab) {
  if (!weight) return;
  LIGER_CHECK(weight->dim() == 1 && weight->size(0) == vocab, "cross_entropy: class weight has ", weight->numel(),
              " elements, the vocabulary has ", vocab);
  LIGER_CHECK(weight->scalar_type() == ScalarType::Float && weight->is_contiguous(), "cross_entropy: class weight is not contiguous fp32");
}

// target [rows] int64, class_weight [vocab] fp32 or none -> LabelStats
Tensor label_stats_torch(const Tensor& target, const std::optional<Tensor>& class_weight, int64_t vocab, int64_t ignore_index) {
  check_target(target);
  check_class_weight(class_weight, vocab);
  if (class_weight) check_devices("cross_entropy", target, *class_weight);
  const TorchHost host(target);
  Tensor stats = empty(target, {kStatsSize}, ScalarType::Int);
  label_stats({.target = const_data<int64_t>(target),
               .class_weight = class_weight ? const_data<float>(*class_weight) : nullptr,
               .stats = data<LabelStats>(stats),
               .rows = target.size(0),
               .vocab = vocab,
               .target_stride = target.stride(0),
               .ignore_index = ignore_index},
              host);
  return stats;
}

struct Outputs {
  Tensor loss, z_loss, hit, prediction;
};

Outputs run(const Tensor& logits, const Tensor& target, const std::optional<Tensor>& class_weight, const Tensor& stats,
            const std::optional<Tensor>& row_scale, int64_t ignore_index, double label_smoothing, double lse_square_scale, double softcap,
            double logit_scale, bool mean, bool token_scaling, bool want_z, bool want_hit, bool want_prediction, const Tensor* grad) {
  check_rows("cross_entropy", "logits", logits);
  check_target(target);
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  LIGER_CHECK(target.size(0) == rows, "cross_entropy: target has ", target.size(0), " elements, logits has ", rows,
              " rows; pass one label a row");
  check_class_weight(class_weight, vocab);
  check_devices("cross_entropy", logits, target, stats);
  if (class_weight) check_devices("cross_entropy", logits, *class_weight);
  check_stats(stats);
  if (row_scale) {
    check_devices("cross_entropy", logits, *row_scale);
    LIGER_CHECK(row_scale->scalar_type() == ScalarType::Float && row_scale->is_contiguous() && row_scale->numel() == rows,
                "cross_entropy: row_scale is not contiguous fp32 with ", rows, " elements");
  }
  const TorchHost host(logits);
  Outputs out{empty(logits, {rows}, ScalarType::Float), empty(logits, {want_z ? rows : 0}, ScalarType::Float),
              empty(logits, {want_hit ? rows : 0}, ScalarType::Float), empty(logits, {want_prediction ? rows : 0}, ScalarType::Long)};
  forward({.logits = const_data(logits),
           .target = const_data<int64_t>(target),
           .class_weight = class_weight ? const_data<float>(*class_weight) : nullptr,
           .stats = const_data<LabelStats>(stats),
           .row_scale = row_scale ? const_data<float>(*row_scale) : nullptr,
           .grad = grad ? data(*grad) : nullptr,
           .loss = data<float>(out.loss),
           .z_loss = want_z ? data<float>(out.z_loss) : nullptr,
           .hit = want_hit ? data<float>(out.hit) : nullptr,
           .prediction = want_prediction ? data<int64_t>(out.prediction) : nullptr,
           .rows = rows,
           .vocab = vocab,
           .logits_stride = logits.stride(0),
           .grad_stride = grad ? grad->stride(0) : vocab,
           .target_stride = target.stride(0),
           .dtype = dtype_of("cross_entropy", logits),
           .ignore_index = ignore_index,
           .label_smoothing = static_cast<float>(label_smoothing),
           .lse_square_scale = static_cast<float>(lse_square_scale),
           .softcap = static_cast<float>(softcap),
           .logit_scale = static_cast<float>(logit_scale),
           .mean = mean,
           .token_scaling = token_scaling},
          host);
  return out;
}

// -> loss [rows] fp32, z_loss, hit, prediction [rows] or empty, grad like logits or [0, vocab]
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward_torch(const Tensor& logits, const Tensor& target,
                                                                 const std::optional<Tensor>& class_weight, const Tensor& stats,
                                                                 const std::optional<Tensor>& row_scale, int64_t ignore_index,
                                                                 double label_smoothing, double lse_square_scale, double softcap,
                                                                 double logit_scale, bool mean, bool token_scaling, bool want_grad,
                                                                 bool want_z, bool want_hit, bool want_prediction) {
  check_rows("cross_entropy", "logits", logits);
  const Tensor grad = empty(logits, {want_grad ? logits.size(0) : 0, logits.size(1)}, logits.scalar_type());
  Outputs out = run(logits, target, class_weight, stats, row_scale, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale,
                    mean, token_scaling, want_z, want_hit, want_prediction, want_grad ? &grad : nullptr);
  return {out.loss, out.z_loss, out.hit, out.prediction, grad};
}

// The gradient is written over the logits.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward_in_place_torch(const Tensor& logits, const Tensor& target,
                                                                  const std::optional<Tensor>& class_weight, const Tensor& stats,
                                                                  const std::optional<Tensor>& row_scale, int64_t ignore_index,
                                                                  double label_smoothing, double lse_square_scale, double softcap,
                                                                  double logit_scale, bool mean, bool token_scaling, bool want_z,
                                                                  bool want_hit, bool want_prediction) {
  Outputs out = run(logits, target, class_weight, stats, row_scale, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale,
                    mean, token_scaling, want_z, want_hit, want_prediction, &logits);
  return {out.loss, out.z_loss, out.hit, out.prediction};
}

// loss, z_loss, hit [rows] or empty, as forward returns them -> their totals, [] each, of like's dtype and fp32; empty where not wanted
std::tuple<Tensor, Tensor, Tensor> totals_torch(const Tensor& loss, const Tensor& z_loss, const Tensor& hit, const Tensor& stats,
                                                const Tensor& like, bool want_z, bool want_hit) {
  check_devices("cross_entropy", loss, z_loss, hit);
  check_devices("cross_entropy", loss, stats);
  const int64_t rows = loss.numel();
  for (const auto& [t, wanted] : {std::pair{&loss, true}, {&z_loss, want_z}, {&hit, want_hit}}) {
    LIGER_CHECK(!wanted || (t->scalar_type() == ScalarType::Float && t->is_contiguous() && t->numel() == rows),
                "cross_entropy: a result has ", t->numel(), " elements, expected contiguous fp32 with ", rows);
  }
  check_stats(stats);
  const TorchHost host(loss);
  const auto scalar = [&](bool wanted, ScalarType type) {
    return wanted ? empty(loss, torch::headeronly::IntHeaderOnlyArrayRef{}, type) : empty(loss, {0}, type);
  };
  const ScalarType type = like.scalar_type();
  Tensor total = scalar(true, type), z_total = scalar(want_z, type), accuracy = scalar(want_hit, ScalarType::Float);
  totals({.loss = const_data<float>(loss),
          .z_loss = want_z ? const_data<float>(z_loss) : nullptr,
          .hit = want_hit ? const_data<float>(hit) : nullptr,
          .stats = const_data<LabelStats>(stats),
          .total = data(total),
          .z_total = want_z ? data(z_total) : nullptr,
          .accuracy = want_hit ? data<float>(accuracy) : nullptr,
          .rows = rows,
          .dtype = dtype_of("cross_entropy", like)},
         host);
  return {total, z_total, accuracy};
}

void run_scale(const Tensor& grad, const Tensor& factor, const Tensor& out) {
  check_rows("cross_entropy", "grad", grad);
  check_devices("cross_entropy", grad, factor);
  LIGER_CHECK(factor.is_contiguous() && (factor.dim() == 0 || factor.numel() == grad.size(0)), "cross_entropy: factor has ", factor.numel(),
              " elements, expected one number or one for each of ", grad.size(0), " rows");
  const TorchHost host(grad);
  scale({.grad = const_data(grad),
         .grad_out = data(out),
         .factor = const_data(factor),
         .factor_dtype = dtype_of("cross_entropy", factor),
         .per_row = factor.dim() != 0,
         .rows = grad.size(0),
         .vocab = grad.size(1),
         .grad_stride = grad.stride(0),
         .out_stride = out.stride(0),
         .dtype = dtype_of("cross_entropy", grad)},
        host);
}

// grad [rows, vocab] * factor, [] or [rows] fp32
Tensor scale_torch(const Tensor& grad, const Tensor& factor) {
  check_rows("cross_entropy", "grad", grad);
  Tensor out = empty(grad, {grad.size(0), grad.size(1)}, grad.scalar_type());
  run_scale(grad, factor, out);
  return out;
}

void scale_in_place_torch(const Tensor& grad, const Tensor& factor) { run_scale(grad, factor, grad); }

}  // namespace

#define LIGER_OPTIONS                                                                                               \
  "Tensor target, Tensor? class_weight, Tensor stats, Tensor? row_scale, int ignore_index, float label_smoothing, " \
  "float lse_square_scale, float softcap, float logit_scale, bool mean, bool token_scaling, "
#define LIGER_WANTED "bool want_z, bool want_hit, bool want_prediction) -> (Tensor loss, Tensor z_loss, Tensor hit, Tensor prediction"

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("cross_entropy_label_stats(Tensor target, Tensor? class_weight, int vocab, int ignore_index) -> Tensor");
  m.def("cross_entropy_forward(Tensor logits, " LIGER_OPTIONS "bool want_grad, " LIGER_WANTED ", Tensor grad)");
  m.def("cross_entropy_forward_(Tensor(a!) logits, " LIGER_OPTIONS LIGER_WANTED ")");
  m.def(
      "cross_entropy_totals(Tensor loss, Tensor z_loss, Tensor hit, Tensor stats, Tensor like, bool want_z, bool want_hit) -> (Tensor "
      "loss, Tensor z_loss, Tensor accuracy)");
  m.def("cross_entropy_scale(Tensor grad, Tensor factor) -> Tensor");
  m.def("cross_entropy_scale_(Tensor(a!) grad, Tensor factor) -> ()");
}

#define LIGER_REGISTER(key)                                               \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {                       \
    m.impl("cross_entropy_label_stats", TORCH_BOX(&label_stats_torch));   \
    m.impl("cross_entropy_forward", TORCH_BOX(&forward_torch));           \
    m.impl("cross_entropy_forward_", TORCH_BOX(&forward_in_place_torch)); \
    m.impl("cross_entropy_totals", TORCH_BOX(&totals_torch));             \
    m.impl("cross_entropy_scale", TORCH_BOX(&scale_torch));               \
    m.impl("cross_entropy_scale_", TORCH_BOX(&scale_in_place_torch));     \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::cross_entropy
