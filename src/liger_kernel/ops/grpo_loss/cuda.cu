// A thread a token, in one launch; 4 to 9 arrays of a few bytes a token, against a row of logits each.
#include <liger_kernel/core/cuda/launch.h>
#include <liger_kernel/ops/grpo_loss/grpo_loss.h>

namespace liger::grpo_loss {
namespace {

#include <liger_kernel/ops/grpo_loss/token.inl.h>

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) tokens_kernel(TokensArgs a) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < a.tokens; i += step) write_token(a, i);
}

}  // namespace

void tokens_cuda(const TokensArgs& a, const Host& host) {
  const int64_t blocks = (a.tokens + kThreads - 1) / kThreads;
  tokens_kernel<<<static_cast<unsigned>(blocks < 65536 ? blocks : 65536), kThreads, 0, stream_of(host)>>>(a);
  check_launch("grpo_loss");
}

}  // namespace liger::grpo_loss
