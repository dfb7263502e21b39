"""Feed-forward modules that run over pieces of the sequence."""

from liger_kernel.ops.geglu.modules import LigerGEGLUMLP
from liger_kernel.ops.swiglu.modules import LigerSwiGLUMLP
from liger_kernel.ops.tiled_mlp import apply_tiled_mlp


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP over `num_shards` pieces of the sequence (see :func:`apply_tiled_mlp`), x (..., S, H). ValueError unless SiLU."""

    def __init__(self, config, num_shards=None):
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x):
        return apply_tiled_mlp(LigerSwiGLUMLP.forward, self, x, self.num_shards)


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """LigerGEGLUMLP over `num_shards` pieces of the sequence, x (..., S, H).

    Raises:
        ValueError: the configuration has a hidden_act that is not "gelu", "gelu_new" or "gelu_pytorch_tanh"; all three mean the last.
    """

    def __init__(self, config, num_shards=None):
        activation = getattr(config, "hidden_act", None)
        if activation not in (None, "gelu", "gelu_new", "gelu_pytorch_tanh"):
            raise ValueError(f"Activation {activation!r} not supported: GeGLU needs 'gelu', 'gelu_new' or 'gelu_pytorch_tanh'")
        super().__init__(config)
        self.num_shards = num_shards

    def forward(self, x):
        return apply_tiled_mlp(LigerGEGLUMLP.forward, self, x, self.num_shards)
