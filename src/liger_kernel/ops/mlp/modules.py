"""SwiGLU feed-forward modules whose forward is one autograd node."""

from torch import nn

from liger_kernel.ops.mlp import LigerMLPFunction
from liger_kernel.ops.swiglu.modules import LigerFalconH1SwiGLUMLP, LigerSwiGLUMLP


def plain(x, *linears):
    """Whether reading the linears' weights is all that calling them would do: no subclass (LoRA, quantised), hook, bias or shard."""
    return not hasattr(x, "to_local") and all(
        type(linear) is nn.Linear and linear.bias is None and not hasattr(linear.weight, "to_local")
        and not (linear._forward_pre_hooks or linear._forward_hooks or linear._backward_pre_hooks or linear._backward_hooks)
        for linear in linears)


def one_node(module, x, otherwise, *multipliers):
    """The module's three projections as one node where they are plain linears, else `otherwise(x)`."""
    linears = module.gate_proj, module.up_proj, module.down_proj
    if not plain(x, *linears):
        return otherwise(x)
    return LigerMLPFunction.apply(x, *(linear.weight for linear in linears), *multipliers)


def refuse_bias(name, config):
    """ValueError when the configuration asks for biases."""
    if getattr(config, "mlp_bias", False):
        raise ValueError(f"{name}: config.mlp_bias is True, and this module has no biases; use the SwiGLU module of the same model")


class LigerMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP that keeps neither the activation nor its product for backward (25 % less of what the layer saves).

    Where its projections are no plain linears (LoRA, quantised, hooked, sharded) it calls them as LigerSwiGLUMLP does.

    Args:
        config: hidden_size, intermediate_size, hidden_act.

    Raises:
        ValueError: hidden_act is neither "silu" nor "swish", or mlp_bias is true.
    """

    def __init__(self, config):
        refuse_bias("LigerMLP", config)
        super().__init__(config)

    def forward(self, x):
        return one_node(self, x, super().forward)


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """The same of Falcon-H1, with `config.mlp_multipliers`. ValueError unless SiLU, and for mlp_bias."""

    def __init__(self, config):
        refuse_bias("LigerFalconH1MLP", config)
        super().__init__(config)

    def forward(self, x):
        return one_node(self, x, super().forward, self.gate_multiplier, self.down_multiplier)
