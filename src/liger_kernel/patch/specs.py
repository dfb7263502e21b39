"""What a table row says about a model: plain data, read without importing torch or transformers."""

import dataclasses
import importlib
import typing

# Types of activation modules, by the function they compute.
ACTIVATIONS = {
    "silu": ("SiLU", "SiLUActivation"),
    "gelu_tanh": ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation"),
    "relu_squared": ("ReLUSquaredActivation",),
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
    """An RMSNorm class: how its forward rounds and scales, and the class of ours that takes its name in the modelling module.

    casting_mode None: transformers has changed it; the installed class is asked (`modules.casting_mode_of`).
    """

    flag: typing.ClassVar = "rms_norm"
    replacement: Replacement = Replacement("rms_norm", "LigerRMSNorm")
    offset: float = 0.0
    casting_mode: str | None = "llama"
    in_place: bool = True
    eps: str = "variance_epsilon"  # the attribute that holds it
    weight: bool = True  # False: its modules may have none
    rename: bool = True  # False: the constructors differ, so the class keeps its name and gets our forward


@dataclasses.dataclass(frozen=True)
class GatedNorm:
    """An RMSNorm class whose forward takes a gate; its modules get our forward, as their constructors differ. Their own `activation` (SiLU
    without one) and `group_size` count; modules with an activation that we do not have are left alone."""

    flag: typing.ClassVar = "rms_norm"
    replacement: Replacement = Replacement("rms_norm_gated", "LigerRMSNormGated")
    norm_before_gate: bool | None = True  # None: the module's own attribute
    casting_mode: str = "llama"
    groups: str | None = None  # the attribute that counts groups, in classes without `group_size`
    rename: typing.ClassVar = False


@dataclasses.dataclass(frozen=True)
class Glu:
    """A gated MLP class; modules with another activation than `activation` are left alone."""

    flag: typing.ClassVar = "mlp"
    replacement: Replacement = Replacement("swiglu", "LigerSwiGLUMLP")
    activation: str = "silu"
    rename: bool = True


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """A LayerNorm class, whose modules get our forward; their constructors differ."""

    flag: typing.ClassVar = "layer_norm"
    replacement: Replacement = Replacement("layer_norm", "LigerLayerNorm")
    weight_offset: float = 0.0  # 1.0: weights stored around zero
    rename: typing.ClassVar = False


@dataclasses.dataclass(frozen=True)
class ReLUSquared:
    """An MLP down(max(up(x), 0)^2), whose activation is replaced; modules with another activation are left alone."""

    flag: typing.ClassVar = "relu_squared"
    replacement: Replacement = Replacement("relu_squared", "LigerReLUSquared")
    activation: typing.ClassVar = "relu_squared"
    rename: typing.ClassVar = False


@dataclasses.dataclass(frozen=True)
class Head:
    """A class with a language-model head and a loss.

    logits = softcap tanh(scale x head(hidden) / softcap), where scale and softcap are read from the model by attribute
    path; a path that starts with "1/" is inverted, and a missing or None attribute means no scale and no cap.
    """

    file: str  # liger_kernel.transformers.model.<file>
    function: str = "lce_forward"
    backbone: str = "model"
    head: str = "lm_head"  # both are attribute paths
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
    norms: dict = dataclasses.field(default_factory=dict)  # class name -> Norm, GatedNorm or LayerNorm
    mlps: dict = dataclasses.field(default_factory=dict)  # class name -> Glu or ReLUSquared
    ropes: dict = dataclasses.field(default_factory=dict)  # function name -> Replacement
    heads: dict = dataclasses.field(default_factory=dict)  # class name -> Head
    left: dict = dataclasses.field(default_factory=dict)  # class or function name -> why it stays as it is
    parts: tuple = ()  # names of rows whose classes and rotations this model is made of too
    types: tuple = ()  # values of config.model_type besides `name`
    modeling: str = ""  # modelling module, when it is not named like the model
    accepts: tuple = ()  # classes that a model must be, or contain; () for any
    rejects_with: type = TypeError  # raised for other models
    tiny: dict = dataclasses.field(default_factory=dict)  # what a small configuration of this type needs, see `patch.tiny`

    @property
    def module(self):
        name = self.modeling or self.name
        return f"transformers.models.{name}.modeling_{name}"

    @property
    def layers(self):
        return {**self.norms, **self.mlps}

    @property
    def mlp_flag(self):
        return "geglu" if "geglu" in dict(self.parameters) else "swiglu"

    def flag_of(self, spec):
        """The option that turns layers of `spec`'s kind on."""
        return self.mlp_flag if spec.flag == "mlp" else spec.flag
