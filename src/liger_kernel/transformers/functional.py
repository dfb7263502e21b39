"""The ops as functions. Each is imported from its op's folder on first use; replacing a name here affects the patched models."""

import importlib
import sys

from liger_kernel._version import __version__

# name -> folder in liger_kernel.ops
_HOME = {
    "CrossEntropyOutput": "cross_entropy",
    "LigerAttnResFunction": "attn_res", "liger_attn_res": "attn_res",
    "LigerCrossEntropyFunction": "cross_entropy", "liger_cross_entropy": "cross_entropy",
    "LigerDyTFunction": "dyt", "liger_dyt": "dyt",
    "LigerFusedAddRMSNormFunction": "fused_add_rms_norm", "liger_fused_add_rms_norm": "fused_add_rms_norm",
    "LigerFusedLinearCrossEntropyFunction": "fused_linear_cross_entropy",
    "liger_fused_linear_cross_entropy": "fused_linear_cross_entropy",
    "LigerFusedLinearJSDFunction": "fused_linear_jsd", "liger_fused_linear_jsd": "fused_linear_jsd",
    "LigerFusedLinearKLDivFunction": "fused_linear_kl_div", "liger_fused_linear_kl_div": "fused_linear_kl_div",
    "LigerFusedNeighborhoodAttentionFunction": "fused_neighborhood_attention",
    "liger_fused_neighborhood_attention": "fused_neighborhood_attention",
    "liger_fused_linear_scaled_cross_entropy_tp": "fused_linear_scaled_cross_entropy",
    "LigerFusedMoEFunction": "fused_moe", "liger_fused_moe": "fused_moe",
    "LigerGELUMulFunction": "geglu", "liger_geglu": "geglu",
    "LigerGroupNormFunction": "group_norm", "liger_group_norm": "group_norm",
    "LigerJSDFunction": "jsd", "liger_jsd": "jsd",
    "LigerKLDivLossFunction": "kl_div", "liger_kl_div": "kl_div",
    "LigerLayerNormFunction": "layer_norm", "liger_layer_norm": "layer_norm",
    "LigerMHCCoeffsFunction": "mhc", "LigerMHCPostResFunction": "mhc", "LigerMHCPreFunction": "mhc",
    "liger_mhc_apply": "mhc", "liger_mhc_coeffs": "mhc", "liger_mhc_forward": "mhc", "liger_mhc_post_res": "mhc", "liger_mhc_pre": "mhc",
    "LigerModulatedRMSNormFunction": "modulated_rms_norm", "liger_modulated_rms_norm": "modulated_rms_norm",
    "LigerMultiTokenAttentionFunction": "multi_token_attention", "liger_multi_token_attention": "multi_token_attention",
    "LigerPolyNormFunction": "poly_norm", "liger_poly_norm": "poly_norm",
    "LigerQwen2VLMRopeFunction": "qwen2vl_mrope", "liger_qwen2vl_mrope": "qwen2vl_mrope",
    "LigerReLUSquaredFunction": "relu_squared", "liger_relu_squared": "relu_squared",
    "LigerRMSNormFunction": "rms_norm",
    "LigerRMSNormGatedFunction": "rms_norm_gated", "liger_rms_norm_gated": "rms_norm_gated",
    "LigerRopeFunction": "rope", "liger_rope": "rope",
    "LigerSiLUMulFunction": "swiglu", "liger_swiglu": "swiglu",
    "LigerSoftmaxFunction": "softmax", "liger_softmax": "softmax",
    "LigerSparsemaxFunction": "sparsemax", "liger_sparsemax": "sparsemax",
    "LigerTVDLossFunction": "tvd", "liger_tvd": "tvd",
}


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    """RMSNorm over the last dimension; see :func:`liger_kernel.ops.rms_norm.rms_norm`. `in_place` changes nothing."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode, in_place)


def __getattr__(name):
    if name == "__all__":  # those of this version
        return sorted(n for n in ("liger_rms_norm", *_HOME) if hasattr(sys.modules[__name__], n))
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"liger_kernel.ops.{_HOME[name]}"), name)
    except (ModuleNotFoundError, AttributeError) as e:
        if isinstance(e, ModuleNotFoundError) and e.name != f"liger_kernel.ops.{_HOME[name]}":
            raise
        raise AttributeError(f"{__name__}.{name} is not provided yet by liger-kernel {__version__}") from None
    return globals().setdefault(name, value)


def __dir__():
    return sorted({*globals(), *_HOME})
