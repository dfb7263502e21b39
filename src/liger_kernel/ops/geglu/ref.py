"""GeGLU in plain PyTorch. On fp64 tensors this is the definition, in the operands' dtype what Hugging Face models run."""

import torch.nn.functional as F


def reference(a, b, approximate="tanh"):
    """GemmaMLP's product: `approximate` as in torch.nn.functional.gelu."""
    return F.gelu(a, approximate=approximate) * b
