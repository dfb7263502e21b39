"""Shapes, options and error bounds of grpo_loss, for its tests and for `liger numerics`."""

import torch

from liger_kernel.core.accuracy import UNIT_ROUNDOFF
from liger_kernel.ops.selective_log_softmax import cases as select

U32 = UNIT_ROUNDOFF[torch.float32]

# (sequences, tokens, vocabulary)
SHAPES = [(2, 1, 3), (3, 5, 33), (4, 7, 257), (2, 9, 5003)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
CLIPPED = TYPES[:5]

# names as of ref.per_token; "importance" says of which shape the ratios are made
OPTIONS = {
    "plain": {},
    "kl": {"beta": 0.1},
    "delta": {"delta": 1.1},
    "corrected kl": {"beta": 0.1, "bias_correction": True},
    "importance": {"beta": 0.04, "importance": "tokens"},
    "importance of sequences": {"importance": "sequences"},
    "bounds": {"epsilon_low": 0.05, "epsilon_high": 0.4, "tau": (2.0, 0.5), "vespo": (1.5, 2.0, 1.0, 0.0)},
}


def memory(sequences, tokens, vocab, dtype):
    """Bytes of the logits: read once forward, read and written once backward."""
    return sequences * (tokens + 1) * vocab * dtype.itemsize


def inputs(shape, dtype, device="cpu", seed=0, importance=None, **_):
    """logits, ids, mask (with a short and an empty sequence), advantages of both signs, ref and old log-probabilities near the current
    ones, importance ratios."""
    g = torch.Generator().manual_seed(seed)
    sequences, tokens, vocab = shape
    logits = (torch.randn(sequences, tokens + 1, vocab, generator=g) * 3).to(dtype)
    ids = torch.randint(vocab, (sequences, tokens), generator=g)
    mask = (torch.rand(sequences, tokens, generator=g) < 0.8).float()
    if sequences > 2:
        mask[1] = 0
    advantages = torch.randn(sequences, generator=g)
    logp = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[..., None]).squeeze(-1)
    ref, old = (logp + 0.3 * torch.randn(logp.shape, generator=g) for _ in range(2))
    ratios = None if importance is None else torch.rand((sequences, tokens) if importance == "tokens" else (sequences,), generator=g) + 0.5
    return [None if t is None else t.to(device) for t in (logits, ids, mask, advantages, ref, old, ratios)]


def logp_error(logits, ids, mask, temperature):
    """Error allowed in log-probabilities: see selective_log_softmax."""
    return select.Bounds(logits[:, :-1], torch.where(mask != 0, ids, -100), temperature).logp


def term_bounds(logp, error, mask, advantages, ref, old, level="token", beta=0.0, tau=(1.0, 1.05), importance=None, vespo=None, **_):
    """Absolute errors allowed in the per-token loss and in its derivative by logp, from errors of logp, in fp64.

    Every term is a product of the advantage, the ratio r (or a smooth function of it, of slope at most (1 + tau) (1 + r)^2), the
    importance and, in cispo and vespo, logp; or of beta and e^k, r. r and e^k are off by the log-probabilities' error relative to
    themselves, and each operation adds some u32. vespo's weight carries the error of a whole sequence.
    """
    logp, mask, a = logp.double(), mask.double(), advantages.double()[:, None]
    d = logp - (logp if old is None else old.double())
    if level == "sequence":
        d = (d * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        error = error.amax(1, keepdim=True).expand_as(error)
    r = d.exp()
    imp = 1.0 if importance is None else (importance[:, None] if importance.dim() == 1 else importance).double()
    size = a.abs() * imp * (1 + r) ** 2 * (1 + max(tau))
    if vespo is not None:
        error = error.sum(1, keepdim=True) + 40 * U32 * logp.shape[1]
        size = size + a.abs() * 60  # phi (k + rate w) at most
    if ref is not None and beta:
        size = size + beta * (1 + (ref.double() - logp).exp()) * (1 + r) * (1 + (ref.double() - logp).abs())
    size = size.expand_as(logp).amax(1, keepdim=True) if level == "sequence" else size
    slope = 4 * (error + 16 * U32 * (1 + logp.abs())) * size
    return slope * (1 + logp.abs()), slope.expand_as(logp)
