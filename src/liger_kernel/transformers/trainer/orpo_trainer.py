"""TRL's ORPOTrainer with the loss taken from the hidden states and the head. The class is made when it is first asked for: other
packages import this module for `_FSDPForwardRedirection` alone, with a trl that has no ORPOTrainer, or without trl."""

import contextlib
import functools
import importlib
import inspect
import sys

import torch

from liger_kernel.transformers.fsdp import _FSDPForwardRedirection


def _base_class():
    """TRL's ORPOTrainer: in `trl.trainer` up to 0.28, in `trl.experimental.orpo` since. ImportError where there is none."""
    for module in ("trl.trainer", "trl.experimental.orpo"):
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(module).ORPOTrainer
    raise ImportError("LigerORPOTrainer needs a trl that has ORPOTrainer: pip install trl")


def _inside(wrapper, inner, method, *arguments):
    """`method(*arguments)`, called from within the forward of `wrapper` (DDP, FSDP, DeepSpeed) around `inner`, if there is one: it gathers
    parameters before and prepares the reduction of their gradients."""
    if wrapper is inner:
        return method(*arguments)
    original = inner.__dict__.get("forward")

    def restore():
        inner.__dict__.pop("forward", None)
        if original is not None:
            inner.__dict__["forward"] = original

    def once(*arguments):
        restore()
        return method(*arguments)

    inner.__dict__["forward"] = once
    try:
        return wrapper(*arguments)
    finally:
        restore()


def _with_head(head, function):
    """`function(hidden -> (hidden, weight, bias))` where the head's weight is whole: in its FSDP 1 unit, gathered under ZeRO-3. LoRA
    adapters on the head are part of the product."""
    from liger_kernel.core.tensors import gather_dtensor
    from liger_kernel.patch import head_weight

    if head_weight._is_fsdp(head, "FullyShardedDataParallel"):
        return _FSDPForwardRedirection()(head, _with_head, head._fsdp_wrapped_module, function)
    head = head_weight._chosen(head)
    lora = head_weight._is_lora(head)
    with head_weight._gathered((head.base_layer if lora else head).weight):
        if lora:
            return function(functools.partial(head_weight._augmented, head))
        return function(lambda hidden: (hidden, gather_dtensor(head.weight), gather_dtensor(head.bias)))


def _router_loss(model, outputs, attention_mask):
    """A mixture of experts' balancing loss: the backbone's, or made from the router logits that it returns."""
    if getattr(outputs, "aux_loss", None) is not None:
        return outputs.aux_loss
    config = model.config.get_text_config()
    experts = next(getattr(config, name) for name in ("num_local_experts", "num_experts", "n_routed_experts") if hasattr(config, name))
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    return function(outputs.router_logits, experts, config.num_experts_per_tok, attention_mask)


_LOGIT_FACTORS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def _fusable(model):
    """Whether the logits are the head's product and nothing else; logs why not, once."""
    from liger_kernel.patch import head_weight

    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = model.config.get_text_config()
    changed = [name for name in _LOGIT_FACTORS if getattr(config, name, None) not in (None, 1, 1.0)]
    if model.config.is_encoder_decoder or changed:
        head_weight.logger.warning("LigerORPOTrainer: trl's own loss is used, with logits: the model %s",
                                   f"has {changed[0]}" if changed else "is an encoder and a decoder")
        return False
    return head_weight.can_fuse(model.get_output_embeddings())


def _make_class(base):
    class LigerORPOTrainer(base):
        """trl's ORPOTrainer whose loss is :class:`liger_kernel.chunked_loss.LigerFusedLinearORPOLoss`: no logits are made.

        One process, DDP, FSDP and ZeRO-3; LoRA, on the head as well. Metrics have trl's names. Models that
        change the logits behind the head (soft cap, scale), encoder-decoder models and heads that are no plain Linear run trl's code.
        """

        def _uses_liger(self, model):
            if "_liger_fusable" not in self.__dict__:
                self._liger_fusable = _fusable(self.accelerator.unwrap_model(model))
            return self._liger_fusable

        def concatenated_forward(self, model, batch):
            """-> (loss, metrics of LigerFusedLinearORPOLoss), the balancing loss of a mixture of experts added to the loss."""
            if not self._uses_liger(model):
                return super().concatenated_forward(model, batch)
            inner = self.accelerator.unwrap_model(model)
            with self.accelerator.autocast():
                return _inside(model, inner, functools.partial(self._liger_loss, inner), batch)

        def _liger_loss(self, model, batch):
            from liger_kernel.chunked_loss import LigerFusedLinearORPOLoss

            ignored = getattr(self, "label_pad_token_id", -100)
            options = {"is_encoder_decoder": False, "padding_value": self.padding_value, "device": self.accelerator.device,
                       "label_pad_token_id": ignored}
            known = inspect.signature(self.concatenated_inputs).parameters
            inputs = self.concatenated_inputs(batch, **{k: v for k, v in options.items() if k in known})
            model = model.get_base_model() if hasattr(model, "get_base_model") else model
            ids, mask = inputs["concatenated_input_ids"], inputs["concatenated_attention_mask"]
            router = {"output_router_logits": True} if self.aux_loss_enabled else {}
            outputs = model.base_model(ids, attention_mask=mask, use_cache=False, **router)
            hidden = outputs.last_hidden_state[:, :-1]
            target = inputs["concatenated_labels"][:, 1:]
            nll_target = torch.where(mask == 1, ids, ignored)[:, 1:]  # the NLL term is over prompt and completion
            loss_fn = LigerFusedLinearORPOLoss(ignore_index=ignored, beta=self.beta)

            def compute(operands):
                x, weight, bias = operands(hidden.to(target.device))
                return loss_fn(weight, x, target.to(x.device), bias, nll_target.to(x.device))

            loss, metrics = _with_head(model.get_output_embeddings(), compute)
            if self.aux_loss_enabled:
                loss = loss + self.aux_loss_coef * _router_loss(model, outputs, mask)
            return loss, metrics

        def get_batch_loss_metrics(self, model, batch, train_eval="train"):
            """-> (loss, metrics as Python floats, means over the processes)."""
            if not self._uses_liger(model):
                return super().get_batch_loss_metrics(model, batch, train_eval)
            loss, values = self.concatenated_forward(model, batch)
            chosen_logps, rejected_logps, chosen_logits, rejected_logits, nll, chosen, rejected, ratio, odds = values
            found = {
                "rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/accuracies": (chosen > rejected).float(),
                "rewards/margins": chosen - rejected, "logps/rejected": rejected_logps, "logps/chosen": chosen_logps,
                "logits/rejected": rejected_logits, "logits/chosen": chosen_logits, "nll_loss": nll, "log_odds_ratio": ratio,
                "log_odds_chosen": odds,
            }
            means = torch.stack([self.accelerator.gather_for_metrics(value).mean() for value in found.values()]).tolist()
            prefix = "eval_" if train_eval == "eval" else ""
            return loss, {prefix + name: mean for name, mean in zip(found, means, strict=True)}

    LigerORPOTrainer.__module__, LigerORPOTrainer.__qualname__ = __name__, "LigerORPOTrainer"
    return LigerORPOTrainer


def __getattr__(name):
    if name != "LigerORPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _make_class(_base_class()))
