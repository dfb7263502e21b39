"""selective_log_softmax: log-probabilities with their gradient against eager code, and entropies."""

from functools import partial

from liger_kernel.cli.numerics.grid import logit_grid, normal, words
from liger_kernel.core.accuracy import assert_accurate
from liger_kernel.ops.selective_log_softmax import selective_log_softmax
from liger_kernel.ops.selective_log_softmax.cases import Bounds
from liger_kernel.ops.selective_log_softmax.ref import eager, reference
from liger_kernel.ops.selective_log_softmax.test_selective_log_softmax import check, run


def against_eager(x, index, up):
    ours, theirs = (run(f, x, index, [up]) for f in (selective_log_softmax, eager))
    truth = run(lambda *a, **k: reference(*a, **k)[0], x.double(), index, [up])
    bounds = Bounds(x, index, 1.0, up)
    assert_accurate(ours[0], truth[0], bounds.logp, theirs[0], "logp")
    assert_accurate(ours[1], truth[1], bounds.grad, theirs[1], "dx")


def cases(device, dtype):
    for regime, x, target in logit_grid(device, dtype):
        x, index = x[None], target[None]
        up, other = (normal(index.shape, device, dtype).float() for _ in range(2))
        yield regime, words(x.shape), partial(against_eager, x, index, up)
        yield regime, f"{words(x.shape)} with entropies", partial(check, x, index, [up, other])
