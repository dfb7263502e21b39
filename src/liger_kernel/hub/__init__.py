"""transformers' `use_kernels` with these kernels, on the CPU and on CUDA: see docs/hub-kernels.md.

    model.set_use_kernels(True, liger_kernel.hub.kernel_config())
"""

import dataclasses
import functools
import pathlib

# What transformers calls a layer -> our class in `hub.layers`.
LAYERS = {
    "RMSNorm": "LigerRMSNorm",
    "RMSNormZeroCentered": "LigerRMSNorm",
    "rotary_pos_emb": "LigerRotaryPosEmb",
    "SwiGLUMLP": "LigerSwiGLUMLP",
    "GeGLUMLP": "LigerGEGLUMLP",
    "ForCausalLMLoss": "LigerForCausalLMLossLayer",
}
DEVICES = ("cpu", "cuda")


@dataclasses.dataclass(frozen=True)
class InstalledLayer:
    """What `kernels` calls a layer repository; this one is the installed package."""

    layer_name: str

    def load(self):
        from liger_kernel.hub import layers

        return getattr(layers, self.layer_name)

    def __str__(self):
        return f"liger_kernel.hub.layers, layer `{self.layer_name}`"


def kernel_mapping(repository=None, revision="main", trust_remote_code=False):
    """A mapping for `kernels.register_kernel_mapping` or `kernels.use_kernel_mapping`, for every mode and for CPU and CUDA.

    Args:
        repository: None for the installed package; a folder that :func:`write_repository` made, or one of its variants; or the
            name of a repository on the Hub, for which the environment variable LOCAL_KERNELS may name a folder.
        revision, trust_remote_code: of a repository on the Hub; see `kernels.LayerRepository`.
    """
    if repository is None:
        make = InstalledLayer
    elif pathlib.Path(repository).is_dir():
        from kernels import LocalLayerRepository

        make = lambda layer: LocalLayerRepository(pathlib.Path(repository).resolve(), layer_name=layer)
    else:
        from kernels import LayerRepository

        make = lambda layer: LayerRepository(repository, layer_name=layer, revision=revision, trust_remote_code=trust_remote_code)
    return {name: dict.fromkeys(DEVICES, make(layer)) for name, layer in LAYERS.items()}


def name_mlps(model):
    """Gives the classes of `model`'s gated MLPs, which transformers leaves without a layer name, the names "SwiGLUMLP" and
    "GeGLUMLP". The names are the classes', so they hold for every model of the process; nothing is replaced by them."""
    from kernels import replace_kernel_forward_from_hub

    from liger_kernel.patch.models import known

    names = {"LigerSwiGLUMLP": "SwiGLUMLP", "LigerGEGLUMLP": "GeGLUMLP"}
    for cls in {type(module) for module in model.modules()}:
        replacement = getattr(known("layers").get(cls.__name__), "replacement", None)
        if replacement is not None and replacement.name in names and cls.__module__.startswith("transformers.models."):
            replace_kernel_forward_from_hub(cls, names[replacement.name])


def kernel_config(repository=None, *, mlp=False, inherit_mapping=False, **hub):
    """A transformers `KernelConfig` that replaces every layer that we have, and works on the CPU too.

    transformers' own class takes one repository a layer name, refuses the CPU and names of layers that the model lacks, and
    registers the mode that the model is in at that moment.

    Args:
        repository: as for :func:`kernel_mapping`, which also takes the other options.
        mlp: also replace gated MLPs; see :func:`name_mlps`.
        inherit_mapping: also use transformers' default kernels, from the Hub, for layers that are not ours.
    """
    return _config_class()(kernel_mapping(repository, **hub), mlp, inherit_mapping)


@functools.cache
def _config_class():
    from transformers import KernelConfig

    class LigerKernelConfig(KernelConfig):
        def __init__(self, mapping, mlp, inherit_mapping):
            super().__init__()
            self.inherit_mapping = inherit_mapping  # older versions of transformers do not look at it, and inherit
            self._mapping, self._mlp = mapping, mlp

        def sanitize_kernel_mapping(self, model):
            if self._mlp:
                name_mlps(model)
            self.store_registered_layer_names(model)

        def create_compatible_mapping(self, model, compile=False):
            self.kernel_mapping = dict(self._mapping)

    return LigerKernelConfig


def write_repository(folder, bundle=True):
    """See :func:`liger_kernel.hub.repository.write`."""
    from liger_kernel.hub.repository import write

    return write(folder, bundle)
