"""GeGLU feed-forward modules of the Gemma families. Their forwards use nothing but the linears, so that they can be bound to a
Hugging Face module."""

import torch.nn as nn

from liger_kernel.ops.geglu import LigerGELUMulFunction


class LigerGEGLUMLP(nn.Module):
    """down_proj(gelu_tanh(gate_proj(x)) up_proj(x)), x [..., hidden_size] -> same shape (Gemma, Gemma-2, Gemma-3).

    The configuration's activation is not looked at: Gemma's early checkpoints name the exact GELU and mean this one.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLPForGemma4(nn.Module):
    """The same as Gemma4TextMLP(config, layer_idx): twice as wide in the layers that reuse another layer's keys and values,
    when `config.use_double_wide_mlp`. Without a layer_idx it has the configuration's width."""

    def __init__(self, config, layer_idx=None):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        shared = getattr(config, "num_kv_shared_layers", 0) or 0
        reuses = layer_idx is not None and shared > 0 and layer_idx >= config.num_hidden_layers - shared
        double = reuses and bool(getattr(config, "use_double_wide_mlp", False))
        self.intermediate_size = config.intermediate_size * (2 if double else 1)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))
