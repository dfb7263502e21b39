"""What a table row says about a model: plain data, read without importing torch or transformers."""

import dataclasses
import importlib

# Types of activation modules, by the function they compute.
ACTIVATIONS = {
    "silu": ("SiLU", "SiLUActivation"),
    "gelu_tanh": ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation"),
}


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A class or function of ours, by the module of `liger_kernel.transformers` that has it."""

    home: str
    name: str

    def load(self):
        return getattr(importlib.import_module(f"liger_kernel.transformers.{self.home}"), self.name)


@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm class: `replacement` has a compatible constructor; the rest says how its forward rounds and scales."""

    replacement: Replacement = Replacement("rms_norm", "LigerRMSNorm")
    offset: float = 0.0
    casting_mode: str = "llama"
    in_place: bool = True
    eps: str = "variance_epsilon"  # the attribute that holds it


@dataclasses.dataclass(frozen=True)
class Glu:
    """A gated MLP class; modules with another activation than `activation` are left alone."""

    replacement: Replacement = Replacement("swiglu", "LigerSwiGLUMLP")
    activation: str = "silu"


@dataclasses.dataclass(frozen=True)
class Head:
    """A class with a language-model head and a loss.

    logits = softcap tanh(scale x head(hidden) / softcap), where scale and softcap are read from the model by attribute
    path; a path that starts with "1/" is inverted, and a missing or None attribute means no scale and no cap.
    """

    file: str  # liger_kernel.transformers.model.<file>
    function: str = "lce_forward"
    backbone: str = "model"
    head: str = "lm_head"
    scale: str | None = None
    softcap: str | None = None
    router_loss: bool = False  # the load-balancing loss of mixture-of-experts models

    def load(self):
        return getattr(importlib.import_module(f"liger_kernel.transformers.model.{self.file}"), self.function)


@dataclasses.dataclass(frozen=True)
class Model:
    """One row: the classes and functions of one modelling module, and the public function that patches them."""

    name: str  # apply_liger_kernel_to_<name>
    parameters: tuple = ()
    norms: dict = dataclasses.field(default_factory=dict)  # class name -> Norm
    mlps: dict = dataclasses.field(default_factory=dict)  # class name -> Glu
    ropes: dict = dataclasses.field(default_factory=dict)  # function name -> Replacement
    heads: dict = dataclasses.field(default_factory=dict)  # class name -> Head
    types: tuple = ()  # values of config.model_type besides `name`
    modeling: str = ""  # modelling module, when it is not named like the model

    @property
    def module(self):
        name = self.modeling or self.name
        return f"transformers.models.{name}.modeling_{name}"

    @property
    def mlp_flag(self):
        return "geglu" if "geglu" in dict(self.parameters) else "swiglu"


# The two common signatures of apply_liger_kernel_to_*: (parameter, default), in positional order.
SWIGLU_PARAMETERS = (
    ("rope", True), ("cross_entropy", False), ("fused_linear_cross_entropy", True), ("rms_norm", True), ("swiglu", True), ("model", None),
)
GEGLU_PARAMETERS = tuple(("geglu", default) if name == "swiglu" else (name, default) for name, default in SWIGLU_PARAMETERS)

HALF_ROPE = {"apply_rotary_pos_emb": Replacement("rope", "liger_rotary_pos_emb")}
