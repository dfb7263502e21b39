"""grpo_loss on logits: one loss of each kind of ratio."""

from functools import partial

from liger_kernel.cli.numerics.grid import words
from liger_kernel.ops.grpo_loss.test_grpo_loss import check


def cases(device, dtype):
    for regime, shape in (("typical", (6, 60, 129)), ("long", (2, 9, 32003))):
        for kind, level in (("grpo", "token"), ("luspo", "sequence"), ("cispo", "token")):
            yield regime, f"{words(shape)} {kind}", partial(check, shape, dtype, device, kind, level, "kl")
