"""The weight behind a language-model head, wherever it is: PEFT wrappers and LoRA, FSDP 1 and 2, DeepSpeed ZeRO-3."""

import contextlib
import functools
import logging
import sys

import torch

from liger_kernel.core.sharded import as_module_takes
from liger_kernel.core.tensors import gather_dtensor

logger = logging.getLogger("liger_kernel")
_warned = set()


def _is_fsdp(module, kind):
    """Whether `module` is a unit of FSDP 1 ("FullyShardedDataParallel") or 2 ("FSDPModule"); neither is imported to find out."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, getattr(fsdp, kind, ()))


def _unwrapped(head):
    """The module in use inside FSDP 1 and PEFT wrappers."""
    return _chosen(head._fsdp_wrapped_module if _is_fsdp(head, "FullyShardedDataParallel") else head)


def _chosen(head):
    """The module in use inside PEFT's ModulesToSaveWrapper: the active adapter's, or the original."""
    while "modules_to_save" in head._modules and "original_module" in head._modules:
        active = None if head.disable_adapters else next((a for a in head.active_adapters if a in head.modules_to_save), None)
        head = head.original_module if active is None else head.modules_to_save[active]
    return head


def _is_lora(head):
    return "lora_A" in head._modules and "base_layer" in head._modules


def _adapters(head):
    if head.merged or head.disable_adapters:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


# Hooks that bring weights and activations to where they are needed, which the fused path does itself.
_HARMLESS = ("torch.distributed.", "deepspeed.", "accelerate.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _origin(hook):
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__module__", None) or type(hook).__module__


def intercepted(module, harmless=_HARMLESS, forwards=()):
    """What runs when `module` is called besides the forward of its class or one of `forwards`, and hooks of the packages `harmless`;
    None if nothing does."""
    for name in _HOOKS:
        if not all(_origin(hook).startswith(harmless) for hook in getattr(module, name).values()):
            return f"{type(module).__name__} has {name.strip('_').replace('_', ' ')}"
        if getattr(torch.nn.modules.module, f"_global{name}"):
            return f"there are global {name.strip('_').replace('_', ' ')}"
    own = module.__dict__.get("_old_forward" if "_hf_hook" in module.__dict__ else "forward")
    own = getattr(own, "__func__", own)
    if own is not None and not any(own is known for known in (type(module).forward, *forwards)):
        return f"the forward of this {type(module).__name__} has been replaced"
    return None


def _called(head):
    """All modules that a call of the head goes through: wrappers, the module in use, its adapters."""
    chosen = _unwrapped(head)
    yield from dict.fromkeys((head, getattr(head, "_fsdp_wrapped_module", head), chosen))
    if _is_lora(chosen):
        yield chosen.base_layer
        yield from (chosen.lora_B[name] for name in _adapters(chosen))


def _obstacle(head):
    """Why the logits are not hidden states times a weight that can be read here, or None."""
    for module in _called(head):
        why = intercepted(module)
        if why is not None:
            return why
    head = _unwrapped(head)
    if _is_lora(head):
        variants = [*getattr(head, "lora_variant", {}), *(name for name, on in getattr(head, "use_dora", {}).items() if on)]
        if any(name in variants for name in _adapters(head)) or getattr(head, "fan_in_fan_out", False):
            return "its LoRA is not a plain one"
        if head.disable_adapters and head.merged:
            return "its adapters are merged but disabled"
        head = head.base_layer
    if type(head).forward is not torch.nn.Linear.forward or not torch.is_floating_point(head.weight):
        return f"{type(head).__name__} is not a plain Linear"
    return "its weight is not loaded" if head.weight.is_meta else None


def can_fuse(head):
    """Whether the loss can be taken from hidden states and weight; warns once for each reason why it cannot."""
    why = _obstacle(head)
    if why is not None and why not in _warned:
        _warned.add(why)
        logger.warning("liger_kernel: the loss is computed from logits, because the head cannot be fused: %s", why)
    return why is None


def ask_labels(head, target, ignore_index):
    """(`target` on the head's device, its counts on the way)."""
    from liger_kernel.ops.cross_entropy import labels

    head = _unwrapped(head)
    target = target.to(head.weight.device)
    return target, labels.ask(target.reshape(-1), head.out_features, ignore_index)


def _augmented(head, hidden):
    """LoRA on the head without forming W + s B A, which half precision would round: [h, s A h] times [W, B]."""
    weight, bias = head.base_layer.weight, head.base_layer.bias
    hiddens, weights = [hidden], [gather_dtensor(weight)]
    for name in _adapters(head):
        down, up, scaling = head.lora_A[name], head.lora_B[name], head.scaling[name]
        narrow = down(head.lora_dropout[name](hidden.to(down.weight.dtype))) * scaling
        hiddens.append(narrow.to(hidden.dtype))
        weights.append(gather_dtensor(up.weight).to(weight.dtype))
        if up.bias is not None:
            bias = up.bias * scaling if bias is None else bias + up.bias * scaling
    if len(hiddens) == 1:
        return hidden, weights[0], bias
    return torch.cat(hiddens, -1), torch.cat(weights, -1), bias


def _gathered(weight):
    """ZeRO-3 keeps parameters empty outside their module's forward; the loss needs the weight here only, not in backward."""
    if weight.numel() or not hasattr(weight, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([weight])


def _inside_fsdp2(unit, compute, hidden, labels, **loss_arguments):
    """`compute` called as the forward of an FSDP 2 unit: its hooks gather the parameters before, and reduce their gradients
    after backward. They look for tensors in the result, so that it is a tuple on its way through them."""
    from liger_kernel.transformers.model import loss_utils

    own = unit.__dict__.pop("forward", None)

    def restore():
        unit.__dict__.pop("forward", None)
        if own is not None:
            unit.__dict__["forward"] = own

    def once(hidden):
        restore()
        return loss_utils.unpack_cross_entropy_result(compute(hidden, labels, **loss_arguments))

    unit.__dict__["forward"] = once
    try:
        return unit(hidden)
    finally:
        restore()


def _loss(head, hidden, labels, **loss_arguments):
    """The fused loss of a head whose weight is whole, or can be made so here."""
    from liger_kernel.transformers.model import loss_utils

    base = head.base_layer if _is_lora(head) else head
    with _gathered(base.weight):
        hidden = as_module_takes(base, hidden.to(base.weight.device))
        if base is head:
            weight, bias = gather_dtensor(head.weight), head.bias
        else:
            hidden, weight, bias = _augmented(head, hidden)
        if bias is not None:
            loss_arguments["bias"] = gather_dtensor(bias)
        return loss_utils.LigerForCausalLMLoss(
            hidden_states=hidden, lm_head_weight=weight, labels=labels, hidden_size=hidden.shape[-1], **loss_arguments)


def fused_loss(head, hidden, labels, **loss_arguments):
    """`loss_utils.LigerForCausalLMLoss` of hidden states and the head's weight, called where the weight is whole."""
    if _is_fsdp(head, "FullyShardedDataParallel"):
        from liger_kernel.transformers.fsdp import _FSDPForwardRedirection

        return _FSDPForwardRedirection()(head, fused_loss, head._fsdp_wrapped_module, hidden, labels, **loss_arguments)
    chosen = _chosen(head)
    compute = functools.partial(_loss, chosen)
    for unit in dict.fromkeys((chosen, head)):
        if _is_fsdp(unit, "FSDPModule"):
            compute = functools.partial(_inside_fsdp2, unit, compute)
    return compute(hidden, labels, **loss_arguments)
