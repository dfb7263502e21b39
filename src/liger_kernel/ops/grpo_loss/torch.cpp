// The only file of this op that knows torch: schema, checks, allocation.
#include <liger_kernel/core/torch/torch.h>
#include <liger_kernel/ops/grpo_loss/grpo_loss.h>

#include <limits>

namespace liger::grpo_loss {
namespace {

using Optional = std::optional<Tensor>;

const float* vector_of(const Tensor& logp, const Tensor& t, const char* what, int64_t size) {
  check_devices("grpo_loss", logp, t);
  LIGER_CHECK(t.dim() == 1 && t.size(0) >= size && t.is_contiguous() && t.scalar_type() == ScalarType::Float, "grpo_loss: ", what, " has ",
              t.numel(), " elements, expected ", size, " contiguous fp32 ones");
  return const_data<float>(t);
}
const float* vector_of(const Tensor& logp, const Optional& t, const char* what, int64_t size) {
  return t ? vector_of(logp, *t, what, size) : nullptr;
}

// [tokens] fp32 each; kl is empty when not wanted, ratio_slope at token level.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tokens_torch(const Tensor& logp, const Optional& old_logp, const Optional& ref_logp,
                                                                const Optional& mask, const Tensor& advantage, const Optional& log_ratio,
                                                                const Optional& phi, const Optional& importance, bool importance_per_token,
                                                                int64_t first, int64_t length, int64_t kind, double low, double high,
                                                                std::optional<double> delta, double beta, bool bias_correction,
                                                                double tau_positive, double tau_negative, bool want_kl) {
  const int64_t n = logp.numel();
  LIGER_CHECK(kind >= 0 && kind <= static_cast<int64_t>(Kind::kVespo), "grpo_loss: kind is ", kind, ", expected 0 to 3");
  LIGER_CHECK(first >= 0 && (length > 0 || n == 0), "grpo_loss: first token ", first, " of sequences of ", length, " tokens");
  const int64_t sequences = n > 0 ? (first + n - 1) / length + 1 : 0;
  const auto out = [&](bool wanted) { return empty(logp, {wanted ? n : 0}, ScalarType::Float); };
  Tensor loss = out(true), kl = out(want_kl), clipped = out(true), slope = out(true), ratio_slope = out(log_ratio.has_value());
  tokens({.logp = vector_of(logp, logp, "logp", n),
          .old_logp = vector_of(logp, old_logp, "old_logp", n),
          .ref_logp = vector_of(logp, ref_logp, "ref_logp", n),
          .mask = vector_of(logp, mask, "mask", n),
          .advantage = vector_of(logp, advantage, "advantages", sequences),
          .log_ratio = vector_of(logp, log_ratio, "log_ratio", sequences),
          .phi = vector_of(logp, phi, "phi", sequences),
          .importance = vector_of(logp, importance, "importance", importance_per_token ? n : sequences),
          .importance_per_token = importance_per_token,
          .loss = data<float>(loss),
          .kl = want_kl ? data<float>(kl) : nullptr,
          .clipped = data<float>(clipped),
          .slope = data<float>(slope),
          .ratio_slope = log_ratio ? data<float>(ratio_slope) : nullptr,
          .tokens = n,
          .first = first,
          .length = length,
          .options = {.kind = static_cast<Kind>(kind),
                      .low = static_cast<float>(low),
                      .high = static_cast<float>(high),
                      .delta = delta ? static_cast<float>(*delta) : std::numeric_limits<float>::infinity(),
                      .beta = static_cast<float>(beta),
                      .bias_correction = bias_correction,
                      .tau_positive = static_cast<float>(tau_positive),
                      .tau_negative = static_cast<float>(tau_negative)}},
         TorchHost(logp));
  return {loss, kl, clipped, slope, ratio_slope};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(liger_kernel, m) {
  m.def(
      "grpo_loss_tokens(Tensor logp, Tensor? old_logp, Tensor? ref_logp, Tensor? mask, Tensor advantages, Tensor? log_ratio, Tensor? phi, "
      "Tensor? importance, bool importance_per_token, int first, int length, int kind, float low, float high, float? delta, float beta, "
      "bool bias_correction, float tau_positive, float tau_negative, bool want_kl) -> (Tensor loss, Tensor kl, Tensor clipped, Tensor "
      "slope, Tensor ratio_slope)");
}

STABLE_TORCH_LIBRARY_IMPL(liger_kernel, CPU, m) { m.impl("grpo_loss_tokens", TORCH_BOX(&tokens_torch)); }
STABLE_TORCH_LIBRARY_IMPL(liger_kernel, CUDA, m) { m.impl("grpo_loss_tokens", TORCH_BOX(&tokens_torch)); }

}  // namespace liger::grpo_loss
