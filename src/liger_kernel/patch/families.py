"""What the rows of the tables have in common: signatures, kinds of norms, the plain decoder."""

import functools
import importlib.util
import pathlib

from liger_kernel.patch.specs import Glu, Head, Model, Norm, Replacement

# The two common signatures of apply_liger_kernel_to_*: (parameter, default), in positional order. "**" takes what is left.
SWIGLU_PARAMETERS = (
    ("rope", True), ("cross_entropy", False), ("fused_linear_cross_entropy", True), ("rms_norm", True), ("swiglu", True), ("model", None),
)
GEGLU_PARAMETERS = tuple(("geglu", default) if name == "swiglu" else (name, default) for name, default in SWIGLU_PARAMETERS)


def defaults(parameters, **changed):
    """`parameters` with other defaults."""
    return tuple((name, changed.get(name, default)) for name, default in parameters)


def with_layer_norm(parameters, before="rms_norm", default=True):
    """`parameters` with layer_norm before the one named `before`."""
    at = [name for name, _ in parameters].index(before)
    return (*parameters[:at], ("layer_norm", default), *parameters[at:])


# How the RMSNorm classes of transformers compute. x is normalised in fp32 everywhere.
ROUND_THEN_SCALE = Norm()  # w round(x)
ROUND_THEN_SCALE_IN_RESIDUAL = Norm(Replacement("rms_norm", "LigerRMSNormForGlm4"), in_place=False)
SCALE_THEN_ROUND = Norm(Replacement("rms_norm", "LigerRMSNormForOlmo2"), casting_mode="gemma", in_place=False)  # round(w x)
WITHOUT_WEIGHT = Norm(casting_mode="gemma", in_place=False, eps="eps", weight=False, rename=False)


def around_one(replacement, in_place=False):
    """round((1 + w) x): weights stored around zero."""
    return Norm(Replacement("rms_norm", replacement), 1.0, "gemma", in_place, "eps")


HALF_ROPE = {"apply_rotary_pos_emb": Replacement("rope", "liger_rotary_pos_emb")}  # the first cos.shape[-1] channels

VISION_ROPE = {"apply_rotary_pos_emb_vision": Replacement("rope", "liger_rotary_pos_emb_vision")}

MOE_MLP = Glu(Replacement("swiglu", "LigerQwen3MoeSwiGLUMLP"))
FUSED_GATE_UP = Glu(Replacement("swiglu", "LigerPhi3SwiGLUMLP"))
VISION_MLP = Glu(rename=False)  # built with (config, bias)
NO_PLAIN_MLP = "no op yet for MLPs without a gate"


def decoder(name, prefix, norm=ROUND_THEN_SCALE, mlp=Glu(), ropes=HALF_ROPE, parameters=SWIGLU_PARAMETERS, *, norms=None, mlps=None,
            head=None, heads=None, **others):
    """The row of a decoder with the classes <prefix>RMSNorm, <prefix>MLP (if `mlp`) and <prefix>ForCausalLM; `norms`, `mlps` and
    `heads` come on top. `head`: what its Head has besides the file, which is named like the row."""
    norms = {f"{prefix}RMSNorm": norm, **(norms or {})}
    mlps = {**({f"{prefix}MLP": mlp} if mlp else {}), **(mlps or {})}
    heads = {f"{prefix}ForCausalLM": Head(**{"file": name, **(head or {})}), **(heads or {})}
    return Model(name, parameters, norms, mlps, ropes, heads, **others)


@functools.cache
def _source(name):
    """The text of transformers' modelling module `name`, "" when it is not there. transformers is not imported."""
    found = importlib.util.find_spec("transformers")
    if not found or not found.origin:
        return ""
    path = pathlib.Path(found.origin).parent / "models" / name / f"modeling_{name}.py"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def mentions(modeling, text):
    """Whether the installed modelling module contains `text`: for what changed between versions of transformers."""
    return text in _source(modeling)


def image_row(name, prefix, parameters, norms=None, mlps=None, ropes=None, head=None, *, heads=None,
              kinds=("ForConditionalGeneration", "Model", "TextModel"), **others):
    """The row of a model of images and text with the class <prefix>ForConditionalGeneration, which takes the classes <prefix><kind>.
    `head`, `heads`: as for :func:`decoder`."""
    heads = {f"{prefix}ForConditionalGeneration": Head(**{"file": name, **(head or {})}), **(heads or {})}
    return Model(name, parameters, norms or {}, mlps or {}, ropes or {}, heads, accepts=tuple(prefix + kind for kind in kinds), **others)
