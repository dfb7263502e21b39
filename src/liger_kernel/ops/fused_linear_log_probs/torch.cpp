// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/fused_linear_log_probs/fused_linear_log_probs.h>

namespace liger::fused_linear_log_probs {
namespace {

constexpr const char* kOp = "fused_linear_log_probs";
using Optional = std::optional<Tensor>;

void check_vector(const Tensor& x, const Tensor& t, const char* what, int64_t size, ScalarType dtype) {
  check_devices(kOp, x, t);
  LIGER_CHECK(t.dim() == 1 && t.size(0) == size && t.is_contiguous() && t.scalar_type() == dtype, kOp, ": ", what, " has ", t.numel(),
              " elements, expected ", size, " contiguous ones of ", dtype == ScalarType::Float ? "fp32" : "x's dtype");
}

Problem problem_of(const Tensor& x, const Tensor& weight, const Tensor& target, const Optional& bias, int64_t ignore_index, double softcap,
                   double logit_scale, double temperature) {
  check_rows(kOp, "x", x);
  check_rows(kOp, "weight", weight);
  LIGER_CHECK(weight.size(1) == x.size(1), kOp, ": x has ", x.size(1), " columns, weight has ", weight.size(1), "; they must be equal");
  check_dtypes(kOp, "weight", weight, "x", x);
  check_devices(kOp, x, weight, target);
  LIGER_CHECK(target.dim() == 1 && target.size(0) == x.size(0), kOp, ": target has ", target.numel(), " elements, x has ", x.size(0),
              " rows");
  LIGER_CHECK(target.scalar_type() == ScalarType::Long, kOp, ": target is not int64");
  if (bias) check_vector(x, *bias, "bias", weight.size(0), x.scalar_type());
  return {.x = const_data(x),
          .weight = const_data(weight),
          .bias = bias ? const_data(*bias) : nullptr,
          .target = const_data<int64_t>(target),
          .rows = x.size(0),
          .hidden = x.size(1),
          .vocab = weight.size(0),
          .x_stride = x.stride(0),
          .weight_stride = weight.stride(0),
          .target_stride = target.stride(0),
          .dtype = dtype_of(kOp, x),
          .ignore_index = ignore_index,
          .transform = {.softcap = static_cast<float>(softcap),
                        .logit_scale = static_cast<float>(logit_scale),
                        .temperature = static_cast<float>(temperature)}};
}

using ResultTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

ResultTensors empty_results(const Tensor& x, bool want_entropy, bool want_prediction) {
  const int64_t rows = x.size(0);
  return {empty(x, {rows}, ScalarType::Float), empty(x, {rows}, ScalarType::Float), empty(x, {rows}, ScalarType::Float),
          empty(x, {want_entropy ? rows : 0}, ScalarType::Float), empty(x, {want_prediction ? rows : 0}, ScalarType::Long)};
}

Results pointers(const ResultTensors& t, bool want_entropy, bool want_prediction) {
  return {.logp = data<float>(std::get<0>(t)),
          .largest = data<float>(std::get<1>(t)),
          .log_sum = data<float>(std::get<2>(t)),
          .entropy = want_entropy ? data<float>(std::get<3>(t)) : nullptr,
          .prediction = want_prediction ? data<int64_t>(std::get<4>(t)) : nullptr};
}

const float* vector_of(const Tensor& x, const Optional& t, const char* what) {
  if (!t) return nullptr;
  check_vector(x, *t, what, x.size(0), ScalarType::Float);
  return const_data<float>(*t);
}

SavedResults saved_results(const Tensor& x, const Tensor& logp, const Tensor& largest, const Tensor& log_sum, const Optional& entropy,
                           const Optional& d_entropy) {
  LIGER_CHECK(!d_entropy || entropy, kOp, ": an upstream gradient of the entropy needs the entropy");
  return {.logp = vector_of(x, logp, "logp"),
          .largest = vector_of(x, largest, "largest"),
          .log_sum = vector_of(x, log_sum, "log_sum"),
          .entropy = vector_of(x, entropy, "entropy")};
}

Upstream upstream_of(const Tensor& x, const Optional& d_logp, const Optional& d_entropy, const Optional& d_lse) {
  return {.logp = vector_of(x, d_logp, "d_logp"), .entropy = vector_of(x, d_entropy, "d_entropy"), .lse = vector_of(x, d_lse, "d_lse")};
}

// logp, largest, log_sum [rows] fp32; entropy [rows] fp32 and prediction [rows] int64, empty when not wanted.
ResultTensors forward_torch(const Tensor& x, const Tensor& weight, const Tensor& target, const Optional& bias, int64_t ignore_index,
                            double softcap, double logit_scale, double temperature, int64_t logits_bytes, bool want_entropy,
                            bool want_prediction) {
  Problem problem = problem_of(x, weight, target, bias, ignore_index, softcap, logit_scale, temperature);
  problem.logits_bytes = logits_bytes;
  ResultTensors results = empty_results(x, want_entropy, want_prediction);
  forward(problem, pointers(results, want_entropy, want_prediction), TorchHost(x));
  return results;
}

// dx [rows, hidden] fp32, dw [vocab, hidden] of weight's dtype or fp32, db [vocab] fp32; of no rows when not wanted.
std::tuple<Tensor, Tensor, Tensor> backward_torch(const Tensor& x, const Tensor& weight, const Tensor& target, const Optional& bias,
                                                  const Tensor& logp, const Tensor& largest, const Tensor& log_sum, const Optional& entropy,
                                                  const Optional& d_logp, const Optional& d_entropy, const Optional& d_lse,
                                                  int64_t ignore_index, double softcap, double logit_scale, double temperature,
                                                  int64_t logits_bytes, bool want_dx, bool want_dw, bool want_db, bool dw_fp32) {
  Problem problem = problem_of(x, weight, target, bias, ignore_index, softcap, logit_scale, temperature);
  problem.logits_bytes = logits_bytes;
  Tensor dx = empty(x, {want_dx ? x.size(0) : 0, x.size(1)}, ScalarType::Float);
  Tensor dw = empty(x, {want_dw ? weight.size(0) : 0, x.size(1)}, dw_fp32 ? ScalarType::Float : x.scalar_type());
  Tensor db = empty(x, {want_db ? weight.size(0) : 0}, ScalarType::Float);
  backward(problem, saved_results(x, logp, largest, log_sum, entropy, d_entropy), upstream_of(x, d_logp, d_entropy, d_lse),
           {.dx = want_dx ? data<float>(dx) : nullptr,
            .dw = want_dw ? data(dw) : nullptr,
            .db = want_db ? data<float>(db) : nullptr,
            .dw_dtype = dw_fp32 ? DType::kF32 : problem.dtype},
           TorchHost(x));
  return {dx, dw, db};
}

void check_scratch(const Tensor& x, const Tensor& logits, const Problem& problem, const Machine& machine) {
  check_devices(kOp, x, logits);
  const int64_t needed = chunk_bytes(problem, machine);
  LIGER_CHECK(logits.is_contiguous() && logits.scalar_type() == ScalarType::Float && logits.numel() * 4 >= needed, kOp,
              ": the logits' memory has ", logits.numel() * 4, " bytes, expected fp32 of at least ", needed);
}

// logits: memory of rows * round_up(vocab, 8) elements; holds the logits afterwards. The results of forward.
ResultTensors chunk_forward_torch(const Tensor& logits, const Tensor& x, const Tensor& weight, const Tensor& target, const Optional& bias,
                                  int64_t ignore_index, double softcap, double logit_scale, double temperature, bool want_entropy,
                                  bool want_prediction) {
  const Problem problem = problem_of(x, weight, target, bias, ignore_index, softcap, logit_scale, temperature);
  const TorchHost host(x);
  check_scratch(x, logits, problem, host.machine);
  ResultTensors results = empty_results(x, want_entropy, want_prediction);
  chunk_forward(problem, data(logits), pointers(results, want_entropy, want_prediction), host);
  return results;
}

// logits: as chunk_forward left them. dw [vocab, hidden] and db [vocab] are added to, or written when not `add`; dx as of backward.
Tensor chunk_backward_torch(const Tensor& logits, const Optional& dw, const Optional& db, const Tensor& x, const Tensor& weight,
                            const Tensor& target, const Tensor& logp, const Tensor& largest, const Tensor& log_sum, const Optional& entropy,
                            const Optional& d_logp, const Optional& d_entropy, const Optional& d_lse, int64_t ignore_index, double softcap,
                            double logit_scale, double temperature, bool want_dx, bool add) {
  const Problem problem = problem_of(x, weight, target, std::nullopt, ignore_index, softcap, logit_scale, temperature);
  const TorchHost host(x);
  check_scratch(x, logits, problem, host.machine);
  if (dw) {
    check_devices(kOp, x, *dw);
    LIGER_CHECK(dw->dim() == 2 && dw->size(0) == problem.vocab && dw->size(1) == problem.hidden && dw->is_contiguous(), kOp,
                ": dw is not contiguous with weight's shape");
    LIGER_CHECK(dw->scalar_type() == ScalarType::Float || dw->scalar_type() == x.scalar_type(), kOp,
                ": dw is neither fp32 nor of x's dtype");
  }
  if (db) check_vector(x, *db, "db", problem.vocab, ScalarType::Float);
  Tensor dx = empty(x, {want_dx ? x.size(0) : 0, x.size(1)}, ScalarType::Float);
  chunk_backward(problem, data(logits), saved_results(x, logp, largest, log_sum, entropy, d_entropy),
                 upstream_of(x, d_logp, d_entropy, d_lse),
                 {.dx = want_dx ? data<float>(dx) : nullptr,
                  .dw = dw ? data(*dw) : nullptr,
                  .db = db ? data<float>(*db) : nullptr,
                  .dw_dtype = dw ? dtype_of(kOp, *dw) : DType::kF32,
                  .add_to_sums = add},
                 host);
  return dx;
}

// --- logits that exist already: selective_log_softmax ------------------------------------------------------------------------

constexpr const char* kSelect = "selective_log_softmax";

void check_logits(const Tensor& logits, const Tensor& target) {
  check_rows(kSelect, "logits", logits);
  check_devices(kSelect, logits, target);
  LIGER_CHECK(target.dim() == 1 && target.size(0) == logits.size(0), kSelect, ": target has ", target.numel(), " elements, logits has ",
              logits.size(0), " rows");
  LIGER_CHECK(target.scalar_type() == ScalarType::Long, kSelect, ": target is not int64");
}

// logp, largest, log_sum [rows] fp32; entropy [rows] fp32, empty when not wanted.
std::tuple<Tensor, Tensor, Tensor, Tensor> select_forward_torch(const Tensor& logits, const Tensor& target, int64_t ignore_index,
                                                                double temperature, bool want_entropy) {
  check_logits(logits, target);
  const TorchHost host(logits);
  const ResultTensors results = empty_results(logits, want_entropy, false);
  statistics({.logits = const_data(logits),
              .target = const_data<int64_t>(target),
              .state = nullptr,
              .results = pointers(results, want_entropy, false),
              .rows = logits.size(0),
              .cols = logits.size(1),
              .first = 0,
              .vocab = logits.size(1),
              .logits_stride = logits.stride(0),
              .target_stride = target.stride(0),
              .dtype = dtype_of(kSelect, logits),
              .ignore_index = ignore_index,
              .transform = {.temperature = static_cast<float>(temperature)}},
             host);
  return {std::get<0>(results), std::get<1>(results), std::get<2>(results), std::get<3>(results)};
}

void select_backward(const Tensor& logits, const Tensor& grad, const Tensor& target, const Tensor& logp, const Tensor& largest,
                     const Tensor& log_sum, const Optional& entropy, const Optional& d_logp, const Optional& d_entropy,
                     int64_t ignore_index, double temperature) {
  check_logits(logits, target);
  gradient({.logits = const_data(logits),
            .grad = data(grad),
            .target = const_data<int64_t>(target),
            .saved = saved_results(logits, logp, largest, log_sum, entropy, d_entropy),
            .upstream = upstream_of(logits, d_logp, d_entropy, std::nullopt),
            .rows = logits.size(0),
            .cols = logits.size(1),
            .first = 0,
            .vocab = logits.size(1),
            .logits_stride = logits.stride(0),
            .grad_stride = grad.stride(0),
            .target_stride = target.stride(0),
            .dtype = dtype_of(kSelect, logits),
            .ignore_index = ignore_index,
            .transform = {.temperature = static_cast<float>(temperature)}},
           TorchHost(logits));
}

// The gradient of the logits, contiguous [rows, vocab].
Tensor select_backward_torch(const Tensor& logits, const Tensor& target, const Tensor& logp, const Tensor& largest, const Tensor& log_sum,
                             const Optional& entropy, const Optional& d_logp, const Optional& d_entropy, int64_t ignore_index,
                             double temperature) {
  check_rows(kSelect, "logits", logits);
  Tensor grad = empty(logits, {logits.size(0), logits.size(1)}, logits.scalar_type());
  select_backward(logits, grad, target, logp, largest, log_sum, entropy, d_logp, d_entropy, ignore_index, temperature);
  return grad;
}

// The same, written over the logits.
void select_backward_in_place_torch(const Tensor& logits, const Tensor& target, const Tensor& logp, const Tensor& largest,
                                    const Tensor& log_sum, const Optional& entropy, const Optional& d_logp, const Optional& d_entropy,
                                    int64_t ignore_index, double temperature) {
  select_backward(logits, logits, target, logp, largest, log_sum, entropy, d_logp, d_entropy, ignore_index, temperature);
}

}  // namespace

#define LIGER_OPTIONS "int ignore_index, float softcap, float logit_scale, float temperature, "
#define LIGER_RESULTS "(Tensor logp, Tensor largest, Tensor log_sum, Tensor entropy, Tensor prediction)"
#define LIGER_SELECT_SAVED                                                                                           \
  "Tensor target, Tensor logp, Tensor largest, Tensor log_sum, Tensor? entropy, Tensor? d_logp, Tensor? d_entropy, " \
  "int ignore_index, float temperature)"
#define LIGER_SAVED \
  "Tensor logp, Tensor largest, Tensor log_sum, Tensor? entropy, Tensor? d_logp, Tensor? d_entropy, Tensor? d_lse, " LIGER_OPTIONS

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def("fused_linear_log_probs_forward(Tensor x, Tensor weight, Tensor target, Tensor? bias, " LIGER_OPTIONS
        "int logits_bytes, bool want_entropy, bool want_prediction) -> " LIGER_RESULTS);
  m.def("fused_linear_log_probs_backward(Tensor x, Tensor weight, Tensor target, Tensor? bias, " LIGER_SAVED
        "int logits_bytes, bool want_dx, bool want_dw, bool want_db, bool dw_fp32) -> (Tensor dx, Tensor dw, Tensor db)");
  m.def("fused_linear_log_probs_chunk_forward_(Tensor(a!) logits, Tensor x, Tensor weight, Tensor target, Tensor? bias, " LIGER_OPTIONS
        "bool want_entropy, bool want_prediction) -> " LIGER_RESULTS);
  m.def(
      "fused_linear_log_probs_chunk_backward_(Tensor(a!) logits, Tensor(b!)? dw, Tensor(c!)? db, Tensor x, Tensor weight, Tensor "
      "target, " LIGER_SAVED "bool want_dx, bool add) -> Tensor dx");
  m.def(
      "selective_log_softmax_forward(Tensor logits, Tensor target, int ignore_index, float temperature, bool want_entropy) -> "
      "(Tensor logp, Tensor largest, Tensor log_sum, Tensor entropy)");
  m.def("selective_log_softmax_backward(Tensor logits, " LIGER_SELECT_SAVED " -> Tensor");
  m.def("selective_log_softmax_backward_(Tensor(a!) logits, " LIGER_SELECT_SAVED " -> ()");
}

#define LIGER_REGISTER(key)                                                                \
  STABLE_TORCH_LIBRARY_IMPL(liger_kernel, key, m) {                                        \
    m.impl("fused_linear_log_probs_forward", TORCH_BOX(&forward_torch));                   \
    m.impl("fused_linear_log_probs_backward", TORCH_BOX(&backward_torch));                 \
    m.impl("fused_linear_log_probs_chunk_forward_", TORCH_BOX(&chunk_forward_torch));      \
    m.impl("fused_linear_log_probs_chunk_backward_", TORCH_BOX(&chunk_backward_torch));    \
    m.impl("selective_log_softmax_forward", TORCH_BOX(&select_forward_torch));             \
    m.impl("selective_log_softmax_backward", TORCH_BOX(&select_backward_torch));           \
    m.impl("selective_log_softmax_backward_", TORCH_BOX(&select_backward_in_place_torch)); \
  }
LIGER_REGISTER(CPU)
LIGER_REGISTER(CUDA)

}  // namespace liger::fused_linear_log_probs
