"""Negative log-probabilities and entropies in the form that verl calls (its experimental fused kernels for RL)."""

import math

import torch

from liger_kernel.ops.cross_entropy import labels
from liger_kernel.ops.fused_linear_log_probs import fused_linear_log_probs

_OP = "fused_linear_scaled_cross_entropy"


def _check(_input, weight, target, temperature, m_tiles_per_cluster, return_entropy):
    if isinstance(m_tiles_per_cluster, bool) or not isinstance(m_tiles_per_cluster, int):
        raise TypeError(f"{_OP}: m_tiles_per_cluster is {m_tiles_per_cluster!r}, expected an integer")
    if not isinstance(return_entropy, bool):
        raise TypeError(f"{_OP}: return_entropy is {return_entropy!r}, expected True or False")
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"{_OP}: temperature is {temperature!r}, expected an int or a float")
    if _input.dtype != weight.dtype or not _input.is_floating_point():
        raise TypeError(f"{_OP}: _input is {_input.dtype} and weight {weight.dtype}, expected the same floating-point dtype")
    if target.dtype != torch.int64:
        raise TypeError(f"{_OP}: target is {target.dtype}, expected torch.int64")
    if m_tiles_per_cluster < 1:
        raise ValueError(f"{_OP}: m_tiles_per_cluster is {m_tiles_per_cluster}, expected at least 1")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"{_OP}: temperature is {temperature}, expected a finite positive number")
    shapes = (f"_input is {tuple(_input.shape)}, weight {tuple(weight.shape)} and target {tuple(target.shape)}, "
              "expected (M, H), (V, H) and (M,)")
    if (_input.dim(), weight.dim(), target.dim()) != (2, 2, 1):
        raise ValueError(f"{_OP}: {shapes}")
    if _input.shape[1] != weight.shape[1] or _input.shape[0] != target.shape[0] or 0 in (*_input.shape, *weight.shape):
        raise ValueError(f"{_OP}: {shapes}, none of them 0")
    if not _input.device == weight.device == target.device:
        raise ValueError(f"{_OP}: tensors lie on {_input.device}, {weight.device} and {target.device}; move them to one device")


class LigerFusedLinearScaledCrossEntropyFunction:
    """Per-token negative log-probability, and the entropy, of softmax(_input weight^T / temperature) without the logits."""

    @staticmethod
    def apply(_input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False):
        """
        Args:
            _input: (M, H), fp32, bf16 or fp16.
            weight: (V, H) of _input's dtype.
            target: (M,) int64 token indices.
            temperature: divides the logits; finite and positive.
            ignore_index: of targets whose results are 0 and which give no gradient.
            m_tiles_per_cluster: a hint to the reference package's kernel; checked, and of no effect.
            return_entropy: also return the entropy.

        Returns:
            nll (M,) fp32 in nats, or (nll, entropy), the entropy of _input's dtype. Both are differentiable in _input and weight.

        Raises:
            TypeError: m_tiles_per_cluster not an int, return_entropy not a bool, temperature not a number; dtypes of _input and weight
                that differ or are not floating-point; a target that is not int64.
            ValueError: m_tiles_per_cluster below 1; a temperature that is not finite and positive; shapes that do not fit or are empty;
                different devices; a target that is neither ignored nor in [0, V) (not under torch.compile: NaN there).
        """
        _check(_input, weight, target, temperature, m_tiles_per_cluster, return_entropy)
        stats = labels.ask(target, weight.shape[0], ignore_index)
        try:
            stats.count()
        except AssertionError as e:
            raise ValueError(f"{_OP}: {e}") from None
        out = fused_linear_log_probs(_input, weight, target, temperature=float(temperature), ignore_index=ignore_index,
                                     return_entropy=return_entropy, label_stats=stats)
        return (-out.logp, out.entropy.to(_input.dtype)) if return_entropy else -out.logp
