"""What the reference package needs before its prebuilt distributed kernels run. Here torch.distributed does that work, which needs no
preparation: the names exist, and `configure` says that nothing was set up."""

import dataclasses
import warnings

__all__ = ["FusedLinearCrossEntropyConfig", "MoEConfig", "configure"]


@dataclasses.dataclass(frozen=True)
class FusedLinearCrossEntropyConfig:
    """Largest sizes of the tensor-parallel loss: tokens, hidden channels and vocabulary columns of a rank; `group` is a key of
    `process_groups`, None the bootstrap group."""

    max_tokens: int
    hidden_size: int
    local_vocab_size: int
    group: object = None
    tiles_per_reduce: int = 1


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Largest sizes of expert-parallel layers; `group` as in :class:`FusedLinearCrossEntropyConfig`."""

    max_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_hosts: int
    gpus_per_host: int
    group: object = None
    max_inflight: int = 1


def configure(*, process_groups=None, bootstrap_group=None, device=None, flsce=None, moe=None):
    """Warns that there is nothing to prepare, and returns False: operations over several ranks use torch.distributed."""
    warnings.warn("configure: liger-kernel native has no distributed kernels of its own; torch.distributed is used", stacklevel=2)
    return False
