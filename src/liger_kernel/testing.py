"""Checks for implementations that others register: :func:`liger_kernel.backends.register_impl`. Needs pytest."""

import pytest
import torch

from liger_kernel.backends import dispatch, resolve_impl

# dtype -> (forward, backward), relative and absolute
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.float16: (1e-2, 5e-2), torch.bfloat16: (2e-2, 1e-1)}


def requires_cuda(reason="CUDA required"):
    """A mark that skips a test where there is no CUDA device."""
    return pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)


def iter_test_shapes(shapes):
    """The shapes as parameters of a test, named like "2x3x64"."""
    return [pytest.param(tuple(shape), id="x".join(map(str, shape))) for shape in shapes]


def pytorch_reference_rms_norm(x, weight, eps, offset=0.0, casting_mode="llama"):
    """RMSNorm in torch operations. "llama" rounds x rstd to x's dtype before the weight, "gemma" works in fp32 and rounds last, "none"
    works in x's dtype throughout.

    Raises:
        ValueError: another casting mode.
    """
    if casting_mode not in ("llama", "gemma", "none"):
        raise ValueError(f"pytorch_reference_rms_norm: casting_mode is {casting_mode!r}, expected 'llama', 'gemma' or 'none'")
    wide = x if casting_mode == "none" else x.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if casting_mode == "gemma":
        return (normal * (offset + weight.float())).to(x.dtype)
    return normal.to(x.dtype) * (offset + weight)


def pytorch_reference_layer_norm(x, weight, bias, eps):
    """LayerNorm over the last dimension in fp32, rounded to x's dtype."""
    bias = None if bias is None else bias.float()
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias, eps).to(x.dtype)


def sum_based_dw_close(dw, dw_ref, rtol, atol=1e-3):
    """Whether weight gradients, sums over all rows, agree: the largest difference is within atol + rtol times the largest gradient (an
    element that cancels carries the rounding of the others).

    Returns:
        (bool, a sentence with both numbers).
    """
    difference = (dw.double() - dw_ref.double()).abs().max().item() if dw.numel() else 0.0
    allowed = atol + rtol * (dw_ref.double().abs().max().item() if dw.numel() else 0.0)
    return difference <= allowed, f"dw differs by {difference:.3g}, allowed {allowed:.3g}"


def _rms_norm(x, w, b, options, function=None, **how):
    offset, casting, eps = options["offset"], options["casting_mode"], options["eps"]
    if function is None:
        return pytorch_reference_rms_norm(x, w, eps, offset, casting)
    return function("rms_norm", x, w, eps, offset, casting, False, None, **how)


def _layer_norm(x, w, b, options, function=None, **how):
    if function is None:
        return pytorch_reference_layer_norm(x, w, b, options["eps"])
    return function("layer_norm", x, w, b, options["eps"], **how)


_OPS = {"rms_norm": _rms_norm, "layer_norm": _layer_norm}


def assert_op_correctness(op_name, backend, shape, dtype, *, casting_mode="llama", offset=0.0, eps=1e-6, seed=0, device=None, extra=None,
                          strict_grad=False):
    """Checks output and gradients of one implementation against torch operations.

    Args:
        op_name: "rms_norm" or "layer_norm".
        backend: the implementation's name.
        shape: of the input; its last dimension is the weight's.
        casting_mode, offset: of rms_norm.
        device: None is the current one.
        extra: further keywords of the call, e.g. {"mode": ...}.
        strict_grad: compare weight gradients element by element instead of by :func:`sum_based_dw_close`.

    Raises:
        KeyError: another op.
        ImplNotAvailableError: the implementation is not there, or not for the device.
        AssertionError: a difference beyond the implementation's registered tolerances, or those of `TOLERANCES`.
    """
    if op_name not in _OPS:
        raise KeyError(f"assert_op_correctness: no check for {op_name!r}, expected one of {', '.join(_OPS)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    implementation = resolve_impl(op_name, backend, device)
    forward, backward = (implementation.tolerances or TOLERANCES)[dtype]
    generator = torch.Generator().manual_seed(seed)

    def random(*size):
        return torch.randn(size, generator=generator).to(device, dtype)

    x, w, b, upstream = random(*shape), random(shape[-1]), random(shape[-1]), random(*shape)
    options = {"casting_mode": casting_mode, "offset": offset, "eps": eps}

    def run(**how):
        leaves = [t.clone().requires_grad_() for t in ((x, w) if op_name == "rms_norm" else (x, w, b))]
        y = _OPS[op_name](*leaves, *([None] * (3 - len(leaves))), options, **how)
        return y, torch.autograd.grad(y, leaves, upstream)

    y, (dx, *dws) = run(function=dispatch, impl=backend, **(extra or {}))
    y_ref, (dx_ref, *dw_refs) = run()
    where = f"{op_name}, {backend}, {tuple(shape)}, {dtype}: "
    torch.testing.assert_close(y, y_ref, rtol=forward, atol=forward, msg=lambda text: f"{where}output: {text}")
    torch.testing.assert_close(dx, dx_ref, rtol=backward, atol=backward, msg=lambda text: f"{where}gradient of x: {text}")
    for dw, dw_ref in zip(dws, dw_refs, strict=True):
        if strict_grad:
            torch.testing.assert_close(dw, dw_ref, rtol=backward, atol=backward, msg=lambda text: f"{where}gradient of w: {text}")
        else:
            close, text = sum_based_dw_close(dw, dw_ref, backward)
            assert close, where + text
