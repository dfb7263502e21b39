// Policy-gradient losses of the GRPO family, per token, from log-probabilities: the loss, the KL term, the clip indicator, and the
// loss's derivatives, from which gradients of logits or of hidden states are formed.
//
//   r = exp(logp - old)  token level;  exp(log_ratio of the sequence)  sequence level;  A = advantage of the sequence
//   clipped   -min(min(r, delta) A, clamp(r, low, high) A)
//   cispo     -min(r, high) A logp, the ratio taken as a constant
//   sapo      -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_positive where A > 0, else tau_negative
//   vespo     -phi A logp, phi a number of the sequence
//   times `importance`;  + beta kl,  kl = e^k - k - 1, k = ref - logp  (times r where corrected)
#pragma once
#include <span>

#include <liger_kernel/core/variant.h>

namespace liger::grpo_loss {

enum class Kind : int64_t { kClipped, kCispo, kSapo, kVespo };

struct Options {
  Kind kind = Kind::kClipped;
  float low = 0.8f, high = 1.2f;  // bounds of the ratio
  float delta = 0;                // largest unclipped ratio; infinity: no bound
  float beta = 0;
  bool bias_correction = false;  // kl is multiplied by r, with r's gradient
  float tau_positive = 1, tau_negative = 1;
};

// Tokens lie in their sequences' order: token i belongs to sequence (first + i) / length.
struct TokensArgs {
  const float* logp;        // [tokens]
  const float* old_logp;    // [tokens]; nullptr: logp itself, r = 1
  const float* ref_logp;    // [tokens]; nullptr: logp itself, kl = 0
  const float* mask;        // [tokens], where 0 every output is 0; nullptr: none is
  const float* advantage;   // [sequences]
  const float* log_ratio;   // [sequences]; nullptr: token level
  const float* phi;         // [sequences], vespo's
  const float* importance;  // [tokens] or [sequences]; nullptr: 1
  bool importance_per_token;
  float* loss;         // [tokens], times mask
  float* kl;           // [tokens], times mask; nullptr: not wanted
  float* clipped;      // [tokens] 1 where the ratio was cut, times mask
  float* slope;        // [tokens] d loss / d logp of the same token (sequence level: without the ratio's part)
  float* ratio_slope;  // [tokens] d loss / d log_ratio of the sequence; written at sequence level alone
  int64_t tokens, first, length;
  Options options;
};

void tokens(const TokensArgs& args, const Host& host);

template <class Args>
std::span<const Variant<Args>> variants();

#include <liger_kernel/core/variants_declare.inl>
#include <liger_kernel/ops/grpo_loss/variants.inc>

}  // namespace liger::grpo_loss
