"""The forward of patched MistralForCausalLM models."""

from liger_kernel.patch.causal_lm import PatchedForward
from liger_kernel.patch.models import rows

_FORWARD = PatchedForward(rows()["mistral"], "MistralForCausalLM")


@_FORWARD.like_original
def lce_forward(self, *args, skip_logits=None, **kwargs):
    """MistralForCausalLM.forward with the loss from hidden states and head weight; see liger_kernel.patch.causal_lm.

    Beyond the original's arguments: skip_logits (None: in training with labels), shift_labels (used as they are),
    num_items_in_batch, ignore_index, return_token_accuracy, return_predicted_tokens, use_token_scaling, label_smoothing,
    lse_square_scale, ce_weight, accum_dtype.
    """
    return _FORWARD(self, args, kwargs, skip_logits)
