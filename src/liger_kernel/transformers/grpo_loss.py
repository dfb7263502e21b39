"""GRPO on logits."""

from liger_kernel.ops.grpo_loss import GrpoLossFunction, _masked_mean, _reduce_grpo_loss, fused_selective_log_softmax, triton_grpo_loss

__all__ = ["GrpoLossFunction", "_masked_mean", "_reduce_grpo_loss", "fused_selective_log_softmax", "triton_grpo_loss"]
