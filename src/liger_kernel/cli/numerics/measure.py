"""Measures what an op's own accuracy check compares: inside :func:`recording` its `assert_accurate` calls are written down."""

import contextlib
import sys

import torch

from liger_kernel.core import accuracy
from liger_kernel.core.accuracy import SMALLEST, UNIT_ROUNDOFF

REFERENCE_ROUNDING = 2.0**-50  # of the tensor's largest element: the fp64 truth is rounded too
MANY = 5000  # the largest error of fewer elements is chance, and no measure for another's
LARGEST_RATIO = 1e9  # stands for an infinite one


def ulps_of(error, truth, dtype):
    """`error` in units in the last place of `dtype` at `truth`: the distance of its two neighbours there. All fp64."""
    _, exponent = torch.frexp(torch.where(truth == 0, SMALLEST[dtype], truth))
    return error / torch.ldexp(torch.full_like(truth, UNIT_ROUNDOFF[dtype]), exponent).clamp(min=SMALLEST[dtype])


def _error(result, truth, dtype):
    """|result - truth|, 0 where both are the same infinity or NaN, and infinite where only one is finite."""
    error = (result - truth).abs()
    same = (result == truth) | (result.isnan() & truth.isnan())
    return torch.where(same, 0.0, error.nan_to_num(nan=float("inf")))


def _largest(values):
    return min(float(values.max()), LARGEST_RATIO) if values.numel() else 0.0


def _verdict(*arguments):
    try:
        accuracy_rule(*arguments)
    except AssertionError as e:
        return str(e)
    return None


accuracy_rule = accuracy.assert_accurate  # itself, also while others record


def measured(actual, truth, bound, eager=None, what="result"):
    """One row: the arguments of `assert_accurate` in numbers, and what it says to them (None when nothing)."""
    dtype, actual, truth, eager = actual.dtype, actual.detach(), truth.detach(), eager if eager is None else eager.detach()
    size = torch.where(truth.isfinite(), truth, 0.0).abs().amax() if truth.numel() else 0.0
    bound = torch.as_tensor(bound, dtype=torch.float64, device=truth.device).detach() + REFERENCE_ROUNDING * size
    rule = _verdict(actual, truth, bound, eager if eager is not None and actual.numel() >= MANY else None, what)
    wide = truth.double()
    wide = torch.where(wide.abs() >= torch.finfo(dtype).max * (1 + UNIT_ROUNDOFF[dtype]), wide.sign() * float("inf"), wide)
    allowed = bound + UNIT_ROUNDOFF[dtype] * wide.abs() + SMALLEST[dtype]
    allowed = torch.where(wide.isfinite(), allowed.nan_to_num(), 1.0)
    row = {"what": what, "pass": "gradient" if what.startswith(("d", "grad")) else "forward", "elements": actual.numel(), "failed": rule,
           "result_dtype": str(dtype).removeprefix("torch.")}
    for name, result in (("ours", actual), ("eager", eager)):
        if result is None:
            row[name] = None
            continue
        error = _error(result.to(wide.device).double(), wide, dtype)
        finite = torch.where(wide.isfinite(), wide, 1.0)
        # Below a thousandth of the largest, sums cancel and have no ULPs to count.
        large = finite.abs() >= finite.abs().amax() / 1000 if finite.numel() else finite > 0
        ulps = _largest(ulps_of(error, finite, dtype)[large])
        row[name] = {"absolute": _largest(error), "ulps": ulps, "of_bound": _largest(error / allowed)}
    return row


@contextlib.contextmanager
def recording():
    """A list that takes a row for every call of `assert_accurate` inside the context, in whatever module; nothing is raised."""
    rows = []

    def note(actual, truth, bound, eager=None, what="result"):
        rows.append(measured(actual, truth, bound, eager, what))

    places = [m for name, m in list(sys.modules.items())
              if name.startswith("liger_kernel.") and vars(m).get("assert_accurate") is accuracy_rule]
    for module in places:
        module.assert_accurate = note
    try:
        yield rows
    finally:
        for module in places:
            module.assert_accurate = accuracy_rule
