"""The forward of patched LlamaForCausalLM models."""

from liger_kernel.patch.causal_lm import PatchedForward
from liger_kernel.patch.head_weight import fused_loss
from liger_kernel.patch.models import rows

_FORWARD = PatchedForward(rows()["llama"], "LlamaForCausalLM")


@_FORWARD.like_original
def lce_forward(self, *args, skip_logits=None, **kwargs):
    """LlamaForCausalLM.forward with the loss from hidden states and head weight; see liger_kernel.patch.causal_lm.

    Beyond the original's arguments: skip_logits (None: in training with labels), shift_labels (used as they are),
    num_items_in_batch, ignore_index, return_token_accuracy, return_predicted_tokens, use_token_scaling, label_smoothing,
    lse_square_scale, ce_weight, accum_dtype.
    """
    return _FORWARD(self, args, kwargs, skip_logits)


def lce_maybe_trainable_lm_head(self, hidden_states, hidden_size, labels, shift_labels, **loss_kwargs):
    """The fused loss of `hidden_states` (..., hidden_size) and the weight of `self.lm_head`, through PEFT, FSDP and ZeRO-3 wrappers."""
    return fused_loss(self.lm_head, hidden_states, labels, shift_labels=shift_labels, **loss_kwargs)
