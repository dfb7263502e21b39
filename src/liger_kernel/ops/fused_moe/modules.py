"""Modules of experts."""

import torch

from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
from liger_kernel.ops.swiglu.modules import check_activation


def _first(config, *names):
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    raise AttributeError(f"fused_moe: the configuration has none of {', '.join(names)}")


class LigerExperts(torch.nn.Module):
    """The experts of a mixture, without router: what MixtralExperts, Qwen3MoeExperts, ... of transformers 5 are.

    Args:
        config: hidden_size, hidden_act; the number of experts is num_experts, num_local_experts or n_routed_experts, their width
            moe_intermediate_size or intermediate_size: the first that is there.

    Attributes:
        gate_up_proj: (E, 2I, H) and down_proj: (E, H, I), not initialised.

    `forward` needs only these two and hidden_dim, so that it can be bound to another library's experts.

    Raises:
        ValueError: hidden_act is neither "silu" nor "swish".
    """

    def __init__(self, config):
        super().__init__()
        check_activation(config.hidden_act)
        self.config = config
        self.num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = _first(config, "moe_intermediate_size", "intermediate_size")
        self.gate_up_proj = torch.nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = torch.nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """hidden_states [..., H], top_k_index and top_k_weights [..., K] (the index of any integer type) -> like hidden_states."""
        top_k = top_k_index.shape[-1]
        index = top_k_index if top_k_index.dtype in (torch.int32, torch.int64) else top_k_index.to(torch.int64)
        out = LigerFusedMoEFunction.apply(
            hidden_states.reshape(-1, self.hidden_dim), self.gate_up_proj, self.down_proj, index.reshape(-1, top_k),
            top_k_weights.reshape(-1, top_k))
        return out.view(hidden_states.shape)

    def extra_repr(self):
        return f"num_experts={self.num_experts}, hidden_dim={self.hidden_dim}, intermediate_dim={self.intermediate_dim}"


class LigerExpertParallelFusedMoe(torch.nn.Module):
    """Experts spread over the ranks of a group. Only a single rank is supported.

    Args:
        process_group: None, or a group of one rank.

    Raises:
        NotImplementedError: a group of several ranks; transformers' own expert parallelism dispatches the tokens, and its local
            experts may be :class:`LigerExperts`.
    """

    def __init__(self, process_group=None):
        super().__init__()
        if process_group is not None and process_group.size() > 1:
            raise NotImplementedError(f"fused_moe: the group has {process_group.size()} ranks; only one is supported")
        self.process_group = process_group

    def forward(self, hidden_states, expert_indices, expert_weights, all_B, all_C, all_A, num_experts):
        """hidden_states (T, H), expert_indices and expert_weights (T, K), all_B gate and all_C up (E, I, H), all_A down (E, H, I)
        -> (T, H). ValueError: `num_experts` is not E."""
        if all_B.shape[0] != num_experts:
            raise ValueError(f"fused_moe: num_experts is {num_experts}, all_B has {all_B.shape[0]}; on one rank they must be equal")
        return LigerFusedMoEFunction.apply(hidden_states, torch.cat((all_B, all_C), 1), all_A, expert_indices, expert_weights)
