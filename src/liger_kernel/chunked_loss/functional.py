"""The losses as functions, `liger_fused_linear_dpo(_input, weight, target, ...)`: each is the `apply` of its class, whose docstring has
the arguments. Imported on first use."""

import importlib

# function -> (module, class)
_HOME = {
    "liger_fused_linear_cosine": ("cosine_similarity_loss", "LigerFusedLinearCosineSimilarityFunction"),
    "liger_fused_linear_cpo": ("cpo_loss", "LigerFusedLinearCPOFunction"),
    "liger_fused_linear_dpo": ("dpo_loss", "LigerFusedLinearDPOFunction"),
    "liger_fused_linear_grpo": ("grpo_loss", "LigerFusedLinearGRPOFunction"),
    "liger_fused_linear_jsd": ("jsd_loss", "LigerFusedLinearJSDFunction"),
    "liger_fused_linear_kto": ("kto_loss", "LigerFusedLinearKTOFunction"),
    "liger_fused_linear_orpo": ("orpo_loss", "LigerFusedLinearORPOFunction"),
    "liger_fused_linear_simpo": ("simpo_loss", "LigerFusedLinearSimPOFunction"),
}


def __getattr__(name):
    if name == "__all__":
        return sorted(_HOME)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, function = _HOME[name]
    return getattr(importlib.import_module(f"liger_kernel.chunked_loss.{module}"), function).apply


def __dir__():
    return sorted({*globals(), *_HOME})
