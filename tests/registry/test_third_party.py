"""Modules and functions that ask for a third party's implementation only while something can be chosen."""

import sys

import pytest
import torch

import liger_kernel.functional as F
import liger_kernel.transformers as liger
from liger_kernel import backends
from liger_kernel.backends import registry
from liger_kernel.ops.backends.registry import FULL_NAMES
from liger_kernel.patch import modules
from liger_kernel.transformers import functional


def _patched_layer_norm():
    norm = torch.nn.LayerNorm(8)
    modules.patch_layer_norm_module(norm)
    return norm


def random(*shapes):
    """Tensors of log-probabilities, which serve as anything else too."""
    return [torch.randn(shape).log_softmax(-1) for shape in shapes]


ROTATED = (1, 2, 3, 8), (1, 2, 3, 8), (1, 3, 8), (1, 3, 8)

# what is called -> (its op, the function, its arguments, how many of them an implementation gets)
ASKING = {
    "LigerLayerNorm": ("layer_norm", liger.LigerLayerNorm(8), lambda: random((3, 8)), 4),
    "patched LayerNorm": ("layer_norm", _patched_layer_norm(), lambda: random((3, 8)), 4),
    "liger_rotary_pos_emb": ("rope", liger.liger_rotary_pos_emb, lambda: random(*ROTATED), 6),
    "liger_rotary_pos_emb, unsqueeze_dim": ("rope", liger.liger_rotary_pos_emb, lambda: [*random(*ROTATED), 1], 6),
    "liger_rotary_pos_emb, rotary_dim": ("rope", liger.liger_rotary_pos_emb, lambda: [*random(*ROTATED), None, 1, 4], 7),
    "LigerCrossEntropyLoss": ("cross_entropy", liger.LigerCrossEntropyLoss(), lambda: [*random((3, 8)), torch.arange(3)], 11),
    "LigerJSD": ("jsd", liger.LigerJSD(), lambda: random((4, 9), (4, 9)), 5),
    "liger_jsd": ("jsd", functional.liger_jsd, lambda: random((4, 9), (4, 9)), 5),
    "LigerJSDFunction": ("jsd", functional.LigerJSDFunction.apply, lambda: random((4, 9), (4, 9)), 5),
    "LigerFusedLinearJSD": ("fused_linear_jsd", liger.LigerFusedLinearJSD(), lambda: [*random((4, 8), (6, 8), (4, 8), (6, 8)), None], 8),
    "LigerFusedLinearKLDivLoss": (
        "fused_linear_kl_div", liger.LigerFusedLinearKLDivLoss(), lambda: [*random((4, 8), (6, 8)), torch.rand(4, 6)], 8),
}
# Those that the reference package does not send through its dispatcher either.
DIRECT = {
    "LigerRMSNorm": ("rms_norm", lambda: liger.LigerRMSNorm(8)(torch.randn(3, 8))),
    "liger_layer_norm": ("layer_norm", lambda: functional.liger_layer_norm(torch.randn(3, 8), torch.ones(8), None, 1e-6)),
    "liger_rope": ("rope", lambda: functional.liger_rope(*[torch.randn(1, 2, 3, 8)] * 2, *[torch.randn(1, 3, 8)] * 2)),
    "liger_cross_entropy": ("cross_entropy", lambda: functional.liger_cross_entropy(torch.randn(3, 8), torch.arange(3))),
    "liger_softmax": ("softmax", lambda: functional.liger_softmax(torch.randn(3, 8))),
}


@pytest.mark.parametrize("name", ASKING)
def test_a_third_party_is_asked(name, monkeypatch):
    """By its rank, by set_impl and by the environment; it gets the arguments of liger_kernel.functional."""
    op, function, make, count = ASKING[name]
    seen = []

    def call():
        return function(*make())

    def theirs(*args, mode=None):
        seen.append((args, mode))
        return (args[0] * 0, None, None, None) if op == "cross_entropy" else args[0] * 0

    backends.register_impl(op, impl_name="theirs", preference_rank=60)(theirs)
    call()
    assert not seen  # ours has the lower rank
    backends.set_impl("theirs")
    assert (call() == 0).all()
    backends.set_impl(None)
    monkeypatch.setenv(f"LIGER_KERNEL_IMPL_{op.upper()}", "theirs")
    call()
    monkeypatch.delenv(f"LIGER_KERNEL_IMPL_{op.upper()}")
    backends.register_impl(op, impl_name="theirs", preference_rank=1, modes=("fast",), default_mode="fast")(theirs)
    call()
    assert [(len(args), mode) for args, mode in seen] == [(count, None), (count, None), (count, "fast")]


@pytest.mark.parametrize("name", DIRECT)
def test_those_that_do_not_ask(name):
    op, call = DIRECT[name]
    backends.register_impl(op, impl_name="theirs", preference_rank=1)(lambda *args, mode=None: pytest.fail("asked"))
    call()


@pytest.mark.parametrize("name", ASKING)
def test_a_choice_of_ours(name):
    """Names that mean ours change nothing; others, and ours for another device, are refused."""
    op, function, make, _ = ASKING[name]
    args = make()
    without = function(*args)
    for choice in ("cpu", "cute", *FULL_NAMES, *FULL_NAMES.values()):
        backends.set_impl(choice)
        torch.testing.assert_close(function(*args), without, rtol=0, atol=0)
    for bad in ("cuda", "eager"):
        backends.set_impl(bad)
        with pytest.raises(backends.ImplNotAvailableError, match=f"{op}: set_impl asks for {bad!r}"):
            function(*args)


@pytest.mark.parametrize("name", ASKING)
def test_nothing_is_asked_without_a_choice(name, monkeypatch):
    """One look at a flag, no look at the environment."""
    monkeypatch.setattr(registry, "choosing", False)
    monkeypatch.setattr(sys.modules["liger_kernel.backends.dispatch"], "resolve_impl", lambda *args: pytest.fail("asked"))
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "eager")
    _, function, make, _ = ASKING[name]
    function(*make())


def test_attributes_of_layer_norm():
    """An instance's own choice comes before the others, and is judged like them."""
    backends.register_impl("layer_norm", impl_name="theirs", preference_rank=60)(lambda *args, mode=None: args[0] * 0 + (mode == "m"))
    backends.set_impl("eager")
    x, norm = torch.randn(3, 8), _patched_layer_norm()
    for module in (norm, liger.LigerLayerNorm(8)):
        module.impl = "cpu"
        torch.testing.assert_close(module(x), torch.nn.functional.layer_norm(x, (8,), eps=module.variance_epsilon))
        module.impl, module.mode = "theirs", "m"
        assert (module(x) == 1).all()
        module.impl, module.mode = "triton", "nothing"
        with pytest.raises(ValueError, match="layer_norm: mode is 'nothing'"):
            module(x)
    backends.set_impl(None)
    registry.choosing = False
    with pytest.raises(backends.ImplNotAvailableError, match="impl asks for 'eager'"):
        liger.LigerLayerNorm(8, impl="eager")(x)


def test_jsd_impl():
    """jsd_impl and jsd_mode of LigerJSDFunction; functional's own choice of ours is not asked again."""
    backends.register_impl("jsd", impl_name="theirs", preference_rank=60)(lambda *args, mode=None: (args[0] * 0).sum() + len(mode or ""))
    backends.set_impl("theirs")
    pair = random((4, 9), (4, 9))
    assert functional.LigerJSDFunction.apply(*pair, None, 0.5, -100, "theirs", "four") == 4
    assert functional.LigerJSDFunction.apply(*pair, None, 0.5, -100, "cpu") > 0 == F.jsd(*pair)
    assert F.jsd(*pair, impl="cpu") > 0
    with pytest.raises(ValueError, match="jsd_impl is 'fast'"):
        functional.LigerJSDFunction.apply(*pair, None, 0.5, -100, "fast")


def test_results_of_cross_entropy():
    """What was asked for comes back under its name; targets that are no class indices stay with torch."""
    backends.register_impl("cross_entropy", impl_name="theirs", preference_rank=1)(lambda *args, mode=None: tuple(torch.arange(4.0)))
    loss, target = liger.LigerCrossEntropyLoss(return_z_loss=True, return_predicted_tokens=True), torch.arange(3)
    output = loss(torch.randn(3, 8), target)
    assert isinstance(output, functional.CrossEntropyOutput)
    assert (output.loss, output.z_loss, output.token_accuracy, output.predicted_tokens) == (0, 1, 2, 3)
    assert liger.LigerCrossEntropyLoss()(torch.randn(3, 8), torch.rand(3, 8)) > 0


@pytest.mark.parametrize("name", [name for name in ASKING if name != "LigerJSDFunction"])
@pytest.mark.parametrize("choice", [None, "triton", "theirs"])
def test_no_graph_break(name, choice):
    """C63. LigerJSDFunction is left out: the compiler does not see the `apply` in which it asks."""
    op, function, make, _ = ASKING[name]
    if choice == "theirs":
        backends.register_impl(op, impl_name="theirs")(lambda *args, mode=None: (args[0] * 0,) * 4)
    backends.set_impl(choice)
    torch.compiler.reset()
    out = torch.compile(function, fullgraph=True, backend="eager")(*make())
    assert ((out[0] if isinstance(out, tuple) else out) == 0).all() == (choice == "theirs")
