"""AutoModelForCausalLM that patches the model's classes first."""

from transformers import AutoConfig, AutoModelForCausalLM

from liger_kernel.transformers import monkey_patch


def _patch(config, kwargs):
    """Patches by the config's type. -> `kwargs` without the flags"""
    model_type = getattr(config, "model_type", None)
    monkey_patch._apply_liger_kernel(model_type, **kwargs)
    function = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    flags = () if function is None else monkey_patch.kept_arguments(function, kwargs)
    return {name: value for name, value in kwargs.items() if name not in flags}


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """AutoModelForCausalLM whose models run on our kernels. Flags of the type's apply_liger_kernel_to_* function may be among the
    keywords. A type that is not supported is built as AutoModelForCausalLM would, and logged."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        config = AutoConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **_patch(config, kwargs))

    @classmethod
    def from_config(cls, config, **kwargs):
        return super().from_config(config, **_patch(config, kwargs))
