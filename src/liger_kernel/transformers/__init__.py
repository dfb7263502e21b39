"""The public import paths of modules, functions and patches. Names are resolved on first use: importing this package needs
neither transformers nor a GPU."""

import importlib
import importlib.util
import pathlib

from liger_kernel._version import __version__

_FOLDER = pathlib.Path(__file__).parent

# name -> module of this package
_HOME = {
    "LigerBlockSparseTop2MLP": "swiglu", "LigerCrossEntropyLoss": "cross_entropy", "LigerDyT": "dyt", "LigerExperts": "experts",
    "LigerFalconH1MLP": "mlp", "LigerFalconH1SwiGLUMLP": "swiglu", "LigerFusedAddRMSNorm": "fused_add_rms_norm",
    "LigerFusedCETVDLoss": "fused_ce_tvd", "LigerFusedLinearCrossEntropyLoss": "fused_linear_cross_entropy",
    "LigerFusedLinearJSD": "fused_linear_jsd", "LigerFusedLinearKLDivLoss": "fused_linear_kl_div", "LigerGEGLUMLP": "geglu",
    "LigerJSD": "jsd", "LigerKLDIVLoss": "kl_div", "LigerLayerNorm": "layer_norm", "LigerMHC": "mhc", "LigerMLP": "mlp",
    "LigerModulatedRMSNorm": "modulated_rms_norm", "LigerMultiTokenAttention": "multi_token_attention",
    "LigerPhi3SwiGLUMLP": "swiglu", "LigerPolyNorm": "poly_norm", "LigerQwen3MoeSwiGLUMLP": "swiglu", "LigerRMSNorm": "rms_norm",
    "LigerRMSNormForMuseGlimmer": "rms_norm", "LigerRMSNormForMuseGlimmerTextCentered": "rms_norm",
    "LigerReLUSquared": "relu_squared", "LigerSoftmax": "softmax", "LigerSparsemax": "sparsemax", "LigerSwiGLUMLP": "swiglu",
    "LigerSwiGLUMLPForMuseGlimmer": "swiglu",
    "LigerTVDLoss": "tvd", "LigerTiledGEGLUMLP": "tiled_mlp", "LigerTiledSwiGLUMLP": "tiled_mlp",
    "LigerVocabParallelCrossEntropy": "vocab_parallel_cross_entropy", "liger_llama4_text_rotary_pos_emb": "llama4_rope",
    "liger_llama4_vision_rotary_pos_emb": "llama4_rope", "liger_rotary_pos_emb": "rope",
}
_UNLISTED = ("LigerExperts", "LigerVocabParallelCrossEntropy")  # importable, but not in __all__

# Names that need transformers, besides every apply_liger_kernel_to_*.
_WITH_TRANSFORMERS = {
    "AutoLigerKernelForCausalLM": "auto_model", "_apply_liger_kernel": "monkey_patch", "_apply_liger_kernel_to_instance": "monkey_patch",
    "fuse_residual_norms": "monkey_patch",
}


def is_transformers_available():
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def _has(module):
    return (_FOLDER / f"{module}.py").exists() or (_FOLDER / module / "__init__.py").exists()


def _apply_names():
    from liger_kernel.patch.models import by_type

    return [f"apply_liger_kernel_to_{model_type}" for model_type in by_type()]


def _all():
    names = [name for name, home in _HOME.items() if _has(home) and name not in _UNLISTED] + ["is_transformers_available"]
    return sorted(names + ([*_WITH_TRANSFORMERS, *_apply_names()] if is_transformers_available() else []))


def __getattr__(name):
    if name == "__all__":
        return _all()
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _WITH_TRANSFORMERS or name.startswith("apply_liger_kernel_to_"):
        if not is_transformers_available():
            raise ImportError(f"liger_kernel.transformers.{name} needs the transformers package: pip install transformers")
        home = _WITH_TRANSFORMERS.get(name, "monkey_patch")
    elif name in _HOME:
        home = _HOME[name]
    elif _has(name):
        return importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name, None) if _has(home) else None
    if value is None:
        raise AttributeError(f"{__name__}.{name} is not provided yet by liger-kernel {__version__}")
    return globals().setdefault(name, value)


def __dir__():
    return sorted({*globals(), *_all()})
