"""RMSNorm, SwiGLU and cross entropy with the constructors and calls of megatron-core."""

import logging

import torch

from liger_kernel.ops.rms_norm import rms_norm
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction
from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy

_log = logging.getLogger(__name__)


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """:class:`LigerVocabParallelCrossEntropy` with Megatron's label smoothing: a K / (K - 1), over a rank's own columns."""

    def __init__(self, ignore_index=-100, label_smoothing=0.0, reduction="none", label_smoothing_formula="megatron",
                 label_smoothing_mode="partition"):
        super().__init__(ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode)


class LigerMegatronRMSNorm(torch.nn.Module):
    """RMSNorm with the constructor of Megatron's norms; the arithmetic is :func:`liger_kernel.ops.rms_norm.rms_norm`'s "llama".

    Args:
        config: a TransformerConfig; `normalization`, `layernorm_zero_centered_gamma` and `sequence_parallel` are read where it has them.
        hidden_size: a number or a tuple of the last dimensions, which are normalised together.
        eps: added to the mean square.
        persist_layer_norm: accepted, changes nothing.
        zero_centered_gamma: the weight starts at 0 and counts as 1 + weight; also where the config says so.
        normalization: accepted, changes nothing; the config's decides.

    Raises:
        ValueError: the config asks for another normalisation.
    """

    def __init__(self, config, hidden_size, eps=1e-5, persist_layer_norm=False, zero_centered_gamma=False, normalization="RMSNorm"):
        super().__init__()
        wanted = getattr(config, "normalization", "RMSNorm")
        if wanted != "RMSNorm":
            raise ValueError(f"LigerMegatronRMSNorm: config.normalization is {wanted!r}, expected 'RMSNorm'; use Megatron's own norm")
        self.hidden_size = torch.Size((hidden_size,) if isinstance(hidden_size, int) else hidden_size)
        self.eps = eps
        self.zero_centered_gamma = bool(zero_centered_gamma or getattr(config, "layernorm_zero_centered_gamma", False))
        self.weight = torch.nn.Parameter(torch.empty(self.hidden_size))
        self.weight.sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        self.reset_parameters()

    def reset_parameters(self):
        """The weight as it starts: zeros where it is centred there, else ones."""
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def forward(self, x):
        """(..., *hidden_size) of x's dtype, from x of that shape."""
        several = len(self.hidden_size) > 1
        rows = x.flatten(-len(self.hidden_size)) if several else x
        weight = self.weight.flatten() if several else self.weight
        y = rms_norm(rows, weight, self.eps, weight_offset=float(self.zero_centered_gamma))
        return y.view(x.shape) if several else y

    def extra_repr(self):
        return f"hidden_size={tuple(self.hidden_size)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LigerMegatronSwiGLU(torch.nn.Module):
    """silu(first half) times second half of the last dimension, with the call of Megatron's `bias_swiglu_impl`.

    Args:
        fallback_impl: called with all four arguments for what the kernel does not do: a bias, storing the input in fp8, offloading it.
        in_place: backward may write the gradient over the input.
    """

    def __init__(self, fallback_impl=None, in_place=False):
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place
        self._told = set()

    def forward(self, input, bias=None, fp8_input_store=False, cpu_offload_input=False):
        """(..., I) from input (..., 2 I), which has two dimensions or three.

        Raises:
            RuntimeError: a bias, fp8_input_store or cpu_offload_input without a fallback.
            ValueError: another number of dimensions; an odd last one.
        """
        reasons = [name for name, given in (("bias", bias is not None), ("fp8_input_store", fp8_input_store),
                                            ("cpu_offload_input", cpu_offload_input)) if given]
        if reasons:
            if self.fallback_impl is None:
                raise RuntimeError(f"LigerMegatronSwiGLU: {', '.join(reasons)} is not supported; give fallback_impl, or leave it out")
            for reason in set(reasons) - self._told:
                self._told.add(reason)
                _log.warning("LigerMegatronSwiGLU: %s is not supported, the fallback is used", reason)
            return self.fallback_impl(input, bias, fp8_input_store, cpu_offload_input)
        if input.dim() not in (2, 3):
            raise ValueError(f"LigerMegatronSwiGLU: input is {tuple(input.shape)}, expected two or three dimensions")
        if input.shape[-1] % 2:
            raise ValueError(f"LigerMegatronSwiGLU: input is {tuple(input.shape)}, expected an even last dimension: gate and up halves")
        return LigerFusedGateUpSiLUMulFunction.apply(input, self.in_place)
