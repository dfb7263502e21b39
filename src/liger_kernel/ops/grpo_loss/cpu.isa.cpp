// Tokens one after the other, compiled once per ISA; a token costs some tens of nanoseconds where its row of logits costs 50 us.
#include <cmath>

#include <liger_kernel/core/cpu/simd.inl.h>
#include <liger_kernel/ops/grpo_loss/grpo_loss.h>

namespace liger::grpo_loss {
namespace {

#include <liger_kernel/ops/grpo_loss/token.inl.h>

}  // namespace

void LIGER_STAMP(tokens)(const TokensArgs& a, const Host& host) {
  host.parallel_for(a.tokens, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) write_token(a, i);
  });
}

}  // namespace liger::grpo_loss
