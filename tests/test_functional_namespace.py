"""liger_kernel.functional: signatures, results against liger_kernel.transformers.functional, and the choice of an implementation."""

import inspect

import pytest
import torch

import liger_kernel.functional as F
from liger_kernel import backends
from liger_kernel.core.accuracy import devices
from liger_kernel.transformers import functional as ours

each_device = pytest.mark.parametrize("device", devices())

# name -> (positional parameters with their defaults, keyword-only ones besides impl, mode, backend)
SIGNATURES = {
    "rms_norm": ("x weight eps=1e-06", "offset=0.0 casting_mode='llama' in_place=False row_mode=None"),
    "layer_norm": ("x weight bias=None eps=1e-06", ""),
    "jsd": ("_input target shift_labels=None beta=0.5 ignore_index=-100", ""),
    "softmax": ("x", ""),
    "swiglu": ("a b gate_multiplier=1.0 down_multiplier=1.0", ""),
    "rope": ("q k cos sin position_ids=None unsqueeze_dim=1", ""),
    "cross_entropy": ("input target weight=None ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0 reduction='mean' softcap=None "
                      "return_z_loss=False return_token_accuracy=False return_predicted_tokens=False", ""),
    "fused_add_rms_norm": ("X R W eps=1e-06 offset=0.0 casting_mode='llama' in_place=False", ""),
    "geglu": ("a b", ""),
    "kl_div": ("y_pred y_true reduction='batchmean' log_target=False eps=1e-10", ""),
    "fused_linear_jsd": ("student_input student_weight teacher_input teacher_weight shift_labels=None jsd_beta=0.5 ignore_index=-100 "
                         "temperature=1.0", ""),
    "fused_linear_cross_entropy": (
        "_input weight target bias=None ce_weight=None ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0 reduction='mean' "
        "softcap=None return_z_loss=False accum_dtype=None use_token_scaling=False return_token_accuracy=False "
        "return_predicted_tokens=False", ""),
}


def test_exactly_these_names():
    assert sorted(F.__all__) == sorted(SIGNATURES) == sorted({*backends.registry.all_registered_ops()} - {"fused_linear_kl_div"})


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    positional, keyword = SIGNATURES[name]
    wanted = f"({', '.join(positional.split())}, *, {', '.join([*keyword.split(), 'impl=None', 'mode=None', 'backend=None'])})"
    assert str(inspect.signature(getattr(F, name))) == wanted
    assert inspect.getdoc(getattr(F, name))


def operands(device):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    labels = torch.randint(0, 50, (12,), generator=generator).to(device)
    labels[::5] = -100
    x, r, w, b, a, head, other = random(12, 32), random(12, 32), random(32), random(32), random(12, 32), random(50, 32), random(50, 32)
    logits, q, k, angle = random(12, 50), random(2, 4, 6, 16), random(2, 2, 6, 16), torch.randn(2, 6, 16, generator=generator).to(device)
    p = torch.softmax(torch.randn(12, 50, generator=generator), -1).to(device)
    return dict(x=x, r=r, w=w, b=b, a=a, head=head, other=other, logits=logits, q=q, k=k, cos=angle.cos(), sin=angle.sin(), p=p,
                labels=labels)


def fields(output):
    return output.loss, output.z_loss, output.token_accuracy, output.predicted_tokens


# name -> (the call, the same call of the function that cannot choose)
CALLS = {
    "rms_norm": (lambda o, **how: F.rms_norm(o["x"], o["w"], 1e-5, offset=1.0, casting_mode="gemma", **how),
                 lambda o: ours.liger_rms_norm(o["x"], o["w"], 1e-5, 1.0, "gemma")),
    "layer_norm": (lambda o, **how: F.layer_norm(o["x"], o["w"], o["b"], 1e-5, **how),
                   lambda o: ours.liger_layer_norm(o["x"], o["w"], o["b"], 1e-5)),
    "jsd": (lambda o, **how: F.jsd(o["logits"].log_softmax(-1), o["p"].log(), o["labels"], 0.3, **how),
            lambda o: ours.liger_jsd(o["logits"].log_softmax(-1), o["p"].log(), o["labels"], 0.3)),
    "softmax": (lambda o, **how: F.softmax(o["x"], **how), lambda o: ours.liger_softmax(o["x"])),
    "swiglu": (lambda o, **how: F.swiglu(o["x"], o["a"], 0.5, 2.0, **how), lambda o: ours.liger_swiglu(o["x"], o["a"], 0.5, 2.0)),
    "rope": (lambda o, **how: F.rope(o["q"], o["k"], o["cos"], o["sin"], **how),
             lambda o: ours.liger_rope(o["q"], o["k"], o["cos"], o["sin"])),
    "cross_entropy": (
        lambda o, **how: F.cross_entropy(o["logits"], o["labels"], None, -100, 1e-4, 0.1, "sum", 30.0, True, True, True, **how),
        lambda o: fields(ours.liger_cross_entropy(
            o["logits"], o["labels"], reduction="sum", label_smoothing=0.1, lse_square_scale=1e-4, softcap=30.0, return_z_loss=True,
            return_token_accuracy=True, return_predicted_tokens=True))),
    "fused_add_rms_norm": (lambda o, **how: F.fused_add_rms_norm(o["x"], o["r"], o["w"], 1e-5, 1.0, "gemma", **how),
                           lambda o: ours.liger_fused_add_rms_norm(o["x"], o["r"], o["w"], 1e-5, 1.0, "gemma")),
    "geglu": (lambda o, **how: F.geglu(o["x"], o["a"], **how), lambda o: ours.liger_geglu(o["x"], o["a"])),
    "kl_div": (lambda o, **how: F.kl_div(o["logits"].log_softmax(-1), o["p"], "mean", **how),
               lambda o: ours.liger_kl_div(o["logits"].log_softmax(-1), o["p"], "mean")),
    "fused_linear_jsd": (
        lambda o, **how: F.fused_linear_jsd(o["x"], o["head"], o["a"], o["other"].detach(), o["labels"], 0.3, -100, 2.0, **how),
        lambda o: ours.liger_fused_linear_jsd(o["x"], o["head"], o["a"], o["other"].detach(), o["labels"], 0.3, -100, 2.0)),
    "fused_linear_cross_entropy": (
        lambda o, **how: F.fused_linear_cross_entropy(
            o["x"], o["head"], o["labels"], None, None, -100, 1e-4, 0.1, "sum", 30.0, True, torch.float32, False, True, True, **how),
        lambda o: fields(ours.liger_fused_linear_cross_entropy(
            o["x"], o["head"], o["labels"], reduction="sum", label_smoothing=0.1, lse_square_scale=1e-4, softcap=30.0, return_z_loss=True,
            accum_dtype=torch.float32, return_token_accuracy=True, return_predicted_tokens=True))),
}


def everything(function, o, **how):
    """Results and gradients."""
    results = function(o, **how)
    results = results if isinstance(results, tuple) else (results,)
    leaves = [t for t in o.values() if t.requires_grad]
    total = sum(r.float().square().sum() for r in results if r is not None and r.requires_grad)
    return [*results, *torch.autograd.grad(total, leaves, allow_unused=True)]


@pytest.mark.parametrize("name", CALLS)
@each_device
def test_results(name, device):
    """Bit for bit those of the function without a choice, whatever accepted name is chosen; inputs keep their values."""
    function, reference = CALLS[name]
    o = operands(device)
    before = {key: t.detach().clone() for key, t in o.items()}
    want = everything(reference, o)
    for how in ({}, {"impl": torch.device(device).type}, {"impl": "nvidia-cutile", "mode": "static_persistent"}, {"backend": "triton"},
                {"mode": "default"}):
        for got, expected in zip(everything(function, o, **how), want, strict=True):
            assert (got is None) == (expected is None) and (got is None or torch.equal(got, expected)), how
    assert all(torch.equal(o[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", CALLS)
@each_device
def test_refusals(name, device):
    function, o = CALLS[name][0], operands(device)
    other = "cpu" if "cuda" in device else "cuda"
    with pytest.raises(backends.ImplNotAvailableError, match=f"{name}: impl asks for '{other}', which tensors on"):
        function(o, impl=other)
    for bad in ("ascend-triton", "eager"):
        with pytest.raises(backends.ImplNotAvailableError, match=f"{name}: impl asks for '{bad}'; registered are cpu, cuda"):
            function(o, impl=bad)
    with pytest.raises(ValueError, match=f"{name}: mode is 'fast', expected None or one of 'default'"):
        function(o, mode="fast")


def test_plain_losses_are_tuples():
    o = operands("cpu")
    for result in (F.cross_entropy(o["logits"], o["labels"]), F.fused_linear_cross_entropy(o["x"], o["head"], o["labels"])):
        assert isinstance(result, tuple) and len(result) == 4 and result[1:] == (None, None, None)


def test_layer_norm_without_bias():
    o = operands("cpu")
    torch.testing.assert_close(F.layer_norm(o["x"], o["w"]), torch.nn.functional.layer_norm(o["x"], (32,), o["w"], eps=1e-6))


@pytest.mark.parametrize("name", CALLS)
@each_device
def test_compiled_without_a_break(name, device):
    function, o = CALLS[name][0], operands(device)
    want = function(o)
    for how in ({}, {"impl": "triton"}):
        got = torch.compile(lambda: function(o, **how), fullgraph=True, backend="aot_eager")()  # noqa: B023
        torch.testing.assert_close(got, want)


def test_signature_of_row_mode_and_meta_tensors():
    x, w = torch.empty(3, 8, device="meta"), torch.empty(8, device="meta")
    assert F.rms_norm(x, w, row_mode=True).shape == x.shape
