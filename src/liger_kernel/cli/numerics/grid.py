"""Value regimes and shapes that ops share, for the `numerics.py` of their folders.

It defines `cases(device, dtype)`, a generator of (regime, shape in words, call): `call()` runs the op's own accuracy check, forward and
backward, and every tensor that the check hands to `assert_accurate` is measured.

Regimes: "typical" values near one; "tiny" ones near 1e-3 and "huge" ones near 100 (logits 30 to 90); "confident" rows, whose
probability is nearly all on one entry; "long" rows, columns or contractions, whose sums have many terms.
"""

import torch

REGIMES = ("typical", "tiny", "huge", "confident", "long")
SCALES = (("typical", 1.0), ("tiny", 1e-3), ("huge", 100.0))


def normal(shape, device, dtype, scale=1.0):
    """Normal numbers times `scale`, drawn on the CPU so that every device sees the same."""
    return (torch.randn(shape) * scale).to(dtype).to(device)


def grid(shape, *long):
    """(regime, shape, scale): `shape` at every magnitude, and the long ones at one."""
    for regime, scale in SCALES:
        yield regime, shape, scale
    for each in long:
        yield "long", each, 1.0


def words(shape):
    return "x".join(map(str, shape))


def confident(rows, vocab, device, dtype, target, by=20.0):
    """Logits [rows, vocab] of which the target's leads by some `by`."""
    logits = torch.randn(rows, vocab)
    logits[torch.arange(rows), target.cpu()] += by
    return logits.to(dtype).to(device)


def logit_grid(device, dtype, rows=64, vocab=1003, long=(2, 128256)):
    """(regime, logits, target): logits at every magnitude, confident and long."""
    for regime, shape, scale in grid((rows, vocab), long):
        yield regime, normal(shape, device, dtype, 3 * min(scale, 30.0)), torch.randint(shape[1], shape[:1]).to(device)
    target = torch.randint(vocab, (rows,)).to(device)
    yield "confident", confident(rows, vocab, device, dtype, target), target


def head_grid(device, dtype, rows=200, hidden=96, vocab=515, long=((40, 4096, 257), (8, 32, 50257))):
    """(regime, x, weight, target) of a language-model head: logits near one, 1e-3 and 30, confident, and long sums."""
    def made(rows, hidden, vocab, scale):
        x, weight = normal((rows, hidden), device, dtype, scale), normal((vocab, hidden), device, dtype, 2 / hidden**0.5)
        return x, weight, torch.randint(vocab, (rows,)).to(device)

    for regime, scale in (("typical", 1.0), ("tiny", 1e-3), ("huge", 30.0)):
        yield regime, *made(rows, hidden, vocab, scale)
    x, weight, target = made(rows, hidden, vocab, 1.0)
    own = weight.float()[target]
    x = (own * (20.0 / own.square().sum(-1, keepdim=True))).to(dtype)  # the target's logit is 20, the others' near 20 / sqrt(hidden)
    yield "confident", x, weight, target
    for shape in long:
        yield "long", *made(*shape, 1.0)
