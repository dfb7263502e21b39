"""KL divergence between given probabilities and a linear layer's output, without its logits."""

from liger_kernel.ops.fused_linear_kl_div import LigerFusedLinearKLDivFunction, LigerFusedLinearKLDivLoss

__all__ = ["LigerFusedLinearKLDivFunction", "LigerFusedLinearKLDivLoss"]
