"""The accuracy rule of every op's tests and of `liger numerics`: error against fp64 within a derived bound, and no worse
than twice the error of eager PyTorch at the same dtype (one unit in the last place is always allowed)."""

import torch

# What a check in the C++ core arrives as: torch's stable ABI made it ValueError up to 2.11 and makes it RuntimeError since.
CORE_ERROR = (RuntimeError, ValueError)
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SMALLEST = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}


def devices():
    """Devices that the tests run on: the CPU, and every CUDA device."""
    return ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def assert_accurate(actual, truth, bound, eager=None, what="result", one_draw=False):
    """Checks `actual` against the fp64 `truth`.

    Args:
        actual: the op's result, any float dtype.
        truth: the same in fp64.
        bound: allowed absolute error, a number or a tensor like `truth`. One rounding to `actual`'s dtype is added.
        eager: eager PyTorch's result at `actual`'s dtype; the largest error may be twice its largest error and one unit in the last
            place.
        what: name for the message.
        one_draw: one element may be twice as far off as that, where the root mean square of all errors is at most 1.25 of eager's: for
            results whose largest error is one of few large terms, and chance.

    Raises:
        AssertionError: shape, NaN/inf pattern or an error outside the bound; names the worst element.
    """
    assert actual.shape == truth.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    dtype, actual, truth = actual.dtype, actual.detach().double().cpu(), truth.detach().double().cpu()
    if actual.numel() == 0:
        return
    overflow = torch.finfo(dtype).max * (1 + UNIT_ROUNDOFF[dtype]) if dtype in UNIT_ROUNDOFF else float("inf")
    truth = torch.where(truth.abs() >= overflow, torch.sign(truth) * float("inf"), truth)
    same_nan = torch.equal(actual.isnan(), truth.isnan())
    assert same_nan, f"{what}: NaN at {int(actual.isnan().sum())} elements, expected at {int(truth.isnan().sum())}"
    same_inf = (actual == truth) | ~(actual.isinf() | truth.isinf())
    assert bool(same_inf.all()), f"{what}: infinities differ at {int((~same_inf).sum())} elements"
    finite = actual.isfinite() & truth.isfinite()
    error = torch.where(finite, (actual - truth).abs(), torch.zeros_like(truth))
    rounding = UNIT_ROUNDOFF[dtype] * truth.abs() + SMALLEST[dtype]
    bound = torch.as_tensor(bound, dtype=torch.float64).detach().cpu()
    allowed = torch.where(finite, bound + rounding, torch.ones_like(truth))
    worst = int((error / allowed).argmax())
    assert bool((error <= allowed).all()), (
        f"{what}: element {worst} is {actual.flatten()[worst]:.9g}, expected {truth.flatten()[worst]:.9g}; error "
        f"{error.flatten()[worst]:.3g}, allowed {allowed.flatten()[worst]:.3g} ({dtype})")
    if eager is not None:
        eager = eager.detach().double().cpu()
        eager_error = torch.where(finite, (eager - truth).abs(), torch.zeros_like(truth)).nan_to_num(nan=float("inf"))
        one = 2 * UNIT_ROUNDOFF[dtype] * truth[finite].abs().max() if finite.any() else 0
        limit = max(2 * float(eager_error.max()) + float(one), float(bound.min()))
        if one_draw and float(error.square().mean()) <= 1.25**2 * float(eager_error.square().mean()):
            limit *= 2
        assert float(error.max()) <= limit, f"{what}: largest error {float(error.max()):.3g}, eager's {float(eager_error.max()):.3g}"


def strided(t, layout):
    """`t`'s values in another memory layout: "contiguous", "sliced" (columns of a wider buffer), "offset" (base pointer one
    element off 16-byte alignment), "every_other" (rows of a taller buffer) or "transposed" (last two dimensions swapped)."""
    if layout == "contiguous":
        return t.contiguous()
    if layout == "sliced":
        wide = t.new_full((*t.shape[:-1], t.shape[-1] + 5), float("nan") if t.is_floating_point() else -1)
        out = wide[..., 2 : 2 + t.shape[-1]]
    elif layout == "offset":
        out = t.new_empty(t.numel() + 1)[1:].view(t.shape)
    elif layout == "every_other":
        out = t.new_full((t.shape[0] * 2, *t.shape[1:]), float("nan") if t.is_floating_point() else -1)[::2]
    elif layout == "transposed":
        out = torch.empty_like(t.mT, memory_format=torch.contiguous_format).mT
    else:
        raise ValueError(f"unknown layout {layout!r}")
    return out.copy_(t)


LAYOUTS = ("contiguous", "sliced", "offset", "every_other", "transposed")
