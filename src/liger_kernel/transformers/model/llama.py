"""The forward of patched LlamaForCausalLM models."""

from liger_kernel.patch.causal_lm import patched_forward
from liger_kernel.patch.head_weight import fused_loss

lce_forward = patched_forward("llama", "LlamaForCausalLM")


def lce_maybe_trainable_lm_head(self, hidden_states, hidden_size, labels, shift_labels, **loss_kwargs):
    """The fused loss of `hidden_states` (..., hidden_size) and the weight of `self.lm_head`, through PEFT, FSDP and ZeRO-3 wrappers."""
    return fused_loss(self.lm_head, hidden_states, labels, shift_labels=shift_labels, **loss_kwargs)
