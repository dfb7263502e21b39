"""Squared ReLU in plain PyTorch: the fp64 definition, which is also what Hugging Face's ReLUSquaredActivation computes."""

import torch


def reference(x):
    """The definition; run it on fp64 tensors for the truth."""
    return torch.square(torch.relu(x))


eager = reference
