// Selector and explanation of grpo_loss.
#include <liger_kernel/ops/grpo_loss/grpo_loss.h>

namespace liger::grpo_loss {

#define LIGER_VARIANTS <liger_kernel/ops/grpo_loss/variants.inc>
#include <liger_kernel/core/variants_table.inl>
template std::span<const Variant<TokensArgs>> variants<TokensArgs>();

void tokens(const TokensArgs& a, const Host& host) {
  if (a.tokens == 0) return;
  LIGER_CHECK(a.options.kind != Kind::kVespo || a.phi, "grpo_loss: vespo needs phi, one number a sequence");
  LIGER_CHECK(!a.log_ratio || a.ratio_slope, "grpo_loss: at sequence level ratio_slope is written");
  LIGER_CHECK(a.length > 0, "grpo_loss: the sequences' length is ", a.length, ", expected a positive number");
  select("grpo_loss", variants<TokensArgs>(), a, host.machine).run(a, host);
}

namespace {

std::string explain(const Problem& p) {
  LIGER_CHECK(p.shape.size() == 2, "grpo_loss: the shape has ", p.shape.size(), " numbers, expected sequences x tokens");
  TokensArgs a{};
  a.tokens = p.shape[0] * p.shape[1], a.length = p.shape[1];
  return explain_rows("tokens", variants<TokensArgs>(), a, p.machine) + "plan\tone token a thread at a time, one pass\n";
}

std::vector<std::string> all_names() { return names(variants<TokensArgs>()); }

const Registration registration({"grpo_loss", "sequences x tokens", explain, all_names});

}  // namespace
}  // namespace liger::grpo_loss
