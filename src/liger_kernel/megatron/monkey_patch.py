"""Puts the kernels in the place of megatron-core's own."""

import functools
import importlib
import warnings

from liger_kernel.megatron.modules import LigerMegatronCrossEntropy, LigerMegatronRMSNorm, LigerMegatronSwiGLU

# Names that megatron-core's modules took from the module that defines them: (module, attribute).
_FUSED_CALLERS = (
    ("megatron.core.models.common.language_module.language_module", "fused_vocab_parallel_cross_entropy"),
    ("megatron.core.models.backends", "_fused_ce"),
)
_UNFUSED_CALLERS = (("megatron.core.tensor_parallel", "vocab_parallel_cross_entropy"),)


def _find(module, *names):
    """(owner, object) of the dotted name in a module. ImportError where it is missing."""
    try:
        owner, found = None, importlib.import_module(module)
        for name in names:
            owner, found = found, getattr(found, name)
    except (ImportError, AttributeError) as e:
        raise ImportError(f"apply_liger_kernel_to_megatron: {'.'.join((module, *names))} is missing ({e}); it needs a megatron-core that "
                          "has it") from e
    return owner, found


def _mark(ours, original):
    ours.__liger_patched__, ours.__wrapped__ = True, original
    return ours


def _patched(thing):
    return vars(thing).get("__liger_patched__", False)


def _norm_builder(original):
    @functools.wraps(original)
    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False, **kwargs):
        if rms_norm:
            return LigerMegatronRMSNorm
        options = {name: value for name, value in (("for_qk", for_qk), ("has_residual", has_residual)) if value}
        return original(self, rms_norm=rms_norm, **options, **kwargs)

    return _mark(layer_norm, original)


def _norm_class(original):
    class LigerMegatronNorm:
        """RMSNorm for configs that ask for it, else Megatron's own norm."""

        def __new__(cls, config, hidden_size, eps=1e-5, **kwargs):
            if getattr(config, "normalization", None) == "RMSNorm":
                known = ("persist_layer_norm", "zero_centered_gamma", "normalization")
                return LigerMegatronRMSNorm(config, hidden_size, eps, **{k: v for k, v in kwargs.items() if k in known})
            return original(config, hidden_size, eps, **kwargs)

    return _mark(LigerMegatronNorm, original)


def _rms_norm():
    provider, original = _find("megatron.core.models.backends", "LocalSpecProvider", "layer_norm")
    block, chosen = _find("megatron.core.transformer.transformer_block", "LayerNormImpl")
    _, plain = _find("megatron.core.transformer.torch_norm", "WrappedTorchNorm")
    if not _patched(original):
        yield provider, "layer_norm", _norm_builder(original)
    if chosen is plain:
        yield block, "LayerNormImpl", _norm_class(chosen)


def _fused_loss(original):
    loss = LigerMegatronCrossEntropy()

    @functools.wraps(original)
    def fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=None):
        return loss(vocab_parallel_logits, target, tp_group)

    return _mark(fused_vocab_parallel_cross_entropy, original)


def _unfused_loss(original):
    @functools.wraps(original)
    def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None):
        return LigerMegatronCrossEntropy(label_smoothing=label_smoothing)(vocab_parallel_logits, target, tp_group)

    return _mark(vocab_parallel_cross_entropy, original)


def _loss(module, name, make, callers):
    """The changes where the function is defined and where callers took it from there; says when no known caller holds it."""
    home, current = _find(module, name)
    ours = current if _patched(current) else make(current)
    if ours is not current:
        yield home, name, ours
    reached = False
    for path, attribute in callers:
        try:
            caller = importlib.import_module(path)
        except ImportError:
            continue  # not in this megatron-core
        held = getattr(caller, attribute, None)
        reached |= held is ours or held is ours.__wrapped__
        if held is ours.__wrapped__:
            yield caller, attribute, ours
    if not reached:
        warnings.warn(f"apply_liger_kernel_to_megatron: none of {', '.join('.'.join(c) for c in callers)} holds megatron-core's {name}; "
                      "a module that imported it from elsewhere keeps Megatron's", stacklevel=2)


def _cross_entropy():
    yield from _loss("megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy", _fused_loss, _FUSED_CALLERS)
    yield from _loss("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy", _unfused_loss, _UNFUSED_CALLERS)


def _swiglu():
    home, original = _find("megatron.core.fusions.fused_bias_swiglu", "SwiGLUFunction")
    if _patched(original):
        return

    def fallback(input, bias, fp8_input_store, cpu_offload_input):
        return original.apply(input, fp8_input_store, cpu_offload_input)

    module = LigerMegatronSwiGLU(fallback)

    class LigerSwiGLUFunction:
        """Megatron's SwiGLUFunction as far as it is called: `apply`."""

        @staticmethod
        def apply(input, fp8_input_store=False, cpu_offload_input=False):
            return module(input, None, fp8_input_store, cpu_offload_input)

    yield home, "SwiGLUFunction", _mark(LigerSwiGLUFunction, original)


def apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=False, swiglu=False):
    """Replaces megatron-core's kernels in its modules, for models built from then on. Calling it again changes nothing. What is replaced
    is kept as `__wrapped__` of what stands in its place.

    Args:
        rms_norm: `LocalSpecProvider.layer_norm` gives :class:`LigerMegatronRMSNorm` for RMSNorm, and so does the block's
            `LayerNormImpl` where that is Megatron's plain-torch norm.
        cross_entropy: the fused and the unfused vocab-parallel loss, with their known callers; a warning where no caller of one
            of them was reached.
        swiglu: `SwiGLUFunction`; storing the input in fp8 and offloading it stay Megatron's.

    Raises:
        ImportError: megatron-core, or a name in it, is missing.
    """
    wanted = [changes for changes, on in ((_rms_norm, rms_norm), (_cross_entropy, cross_entropy), (_swiglu, swiglu)) if on]
    for owner, name, value in [change for changes in wanted for change in changes()]:  # all are found before the first is made
        setattr(owner, name, value)
