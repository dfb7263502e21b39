"""Selected log-probabilities in plain PyTorch: the fp64 definition, and what trainers run."""

import torch


def reference(logits, index, temperature=1.0, ignore_index=-100):
    """(logp, entropy) of the index's shape by the definition; run it on fp64 tensors for the truth."""
    log_p = torch.log_softmax(logits / temperature, -1)
    valid = index != ignore_index
    logp = log_p.gather(-1, torch.where(valid, index, 0)[..., None]).squeeze(-1)
    entropy = -torch.special.xlogy(log_p.exp(), log_p.exp()).sum(-1)
    return torch.where(valid, logp, 0), torch.where(valid, entropy, 0)


def eager(logits, index, temperature=1.0):
    """log_softmax in fp32 of the logits over the temperature, and gather."""
    log_p = torch.log_softmax(logits.float() / temperature, -1)
    return log_p.gather(-1, index[..., None]).squeeze(-1)
