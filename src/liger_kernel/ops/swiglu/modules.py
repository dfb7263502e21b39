"""SwiGLU feed-forward modules of the model families: the constructors, attributes and parameter names of the classes that
they replace. Their forwards use nothing but the linears (Falcon-H1: and its multipliers), so that they can be bound to a
Hugging Face module, whose own biases then act through its linears."""

import torch.nn as nn

from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction


def check_activation(activation):
    """ValueError unless the configuration's activation is SiLU."""
    if activation not in ("silu", "swish"):
        raise ValueError(f"Activation {activation!r} not supported: SwiGLU needs 'silu' or 'swish'")


class LigerSwiGLUMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) up_proj(x)), x [..., hidden_size] -> same shape (Llama, Mistral, Qwen2, ...).

    Args:
        config: hidden_size, intermediate_size, hidden_act; biases when `config.mlp_bias` is there and true.
        intermediate_size: in place of the configuration's (DeepSeek's shared experts).

    Raises:
        ValueError: hidden_act is neither "silu" nor "swish".
    """

    def __init__(self, config, intermediate_size=None):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        check_activation(config.hidden_act)

    def forward(self, x):
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerBlockSparseTop2MLP(nn.Module):
    """w2(silu(w1(x)) w3(x)): one expert of Mixtral. ValueError for another activation than SiLU."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_size = self.hidden_dim = config.hidden_size
        self.intermediate_size = self.ffn_dim = config.intermediate_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        check_activation(config.hidden_act)

    def forward(self, x):
        return self.w2(LigerSiLUMulFunction.apply(self.w1(x), self.w3(x)))


class LigerPhi3SwiGLUMLP(nn.Module):
    """down_proj(silu(gate) up), gate and up the halves of gate_up_proj(x) (Phi-3, GLM-4). ValueError unless SiLU."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        check_activation(config.hidden_act)

    def forward(self, x):
        return self.down_proj(LigerFusedGateUpSiLUMulFunction.apply(self.gate_up_proj(x)))


class LigerQwen3MoeSwiGLUMLP(nn.Module):
    """LigerSwiGLUMLP without biases, as Qwen3MoeMLP(config, intermediate_size=None). ValueError unless SiLU."""

    def __init__(self, config, intermediate_size=None):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        check_activation(config.hidden_act)

    def forward(self, x):
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerHunyuanV1SwiGLUMLP(LigerQwen3MoeSwiGLUMLP):
    """The same as HunYuanDenseV1MLP(config, layer_idx=None, is_shared_mlp=False)."""

    def __init__(self, config, layer_idx=None, is_shared_mlp=False):
        super().__init__(config)
        self.layer_idx = layer_idx

    def forward(self, x):
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerFalconH1SwiGLUMLP(nn.Module):
    """down_proj(silu(gate_proj(x) gate_multiplier) up_proj(x)) down_multiplier. ValueError unless SiLU.

    Without a bias on down_proj its multiplier is taken into the product, which saves a pass over the output.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        bias = bool(getattr(config, "mlp_bias", False))
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers
        check_activation(config.hidden_act)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if getattr(self.down_proj, "bias", None) is None:
            return self.down_proj(LigerSiLUMulFunction.apply(gate, up, self.gate_multiplier, self.down_multiplier))
        return self.down_proj(LigerSiLUMulFunction.apply(gate, up, self.gate_multiplier)) * self.down_multiplier


class LigerSwiGLUMLPForMuseGlimmer(nn.Module):
    """As Qwen3-MoE's; the activation is `config.hidden_activation`, or `hidden_act` without one. ValueError unless SiLU."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        activation = getattr(config, "hidden_activation", None)
        check_activation(getattr(config, "hidden_act", None) if activation is None else activation)

    def forward(self, x):
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))
