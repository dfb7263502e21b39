"""liger_kernel.megatron, with stand-ins for the modules of megatron-core that it knows."""

import subprocess
import sys
import types
import warnings

import pytest
import torch

import liger_kernel.megatron as liger
from liger_kernel.core.accuracy import devices

each_device = pytest.mark.parametrize("device", devices())


def config(**options):
    return types.SimpleNamespace(**options)


def swiglu(x):
    a, b = x.chunk(2, -1)
    return torch.nn.functional.silu(a) * b


# --- modules --------------------------------------------------------------------------------------------------------------------


def test_imports_without_megatron():
    code = ("import sys, liger_kernel.megatron as m\n"
            "assert not any(n.split('.')[0] in ('megatron', 'transformers') for n in sys.modules)\n"
            "try:\n    m.apply_liger_kernel_to_megatron()\nexcept ImportError as e:\n    print(e)\n")
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "megatron.core.models.backends" in out and "missing" in out


def test_names():
    assert set(liger.__all__) == {"LigerMegatronCrossEntropy", "LigerMegatronRMSNorm", "LigerMegatronSwiGLU",
                                  "apply_liger_kernel_to_megatron"}


@pytest.mark.parametrize("centered", [None, "argument", "config"])
@each_device
def test_rms_norm(centered, device):
    norm = liger.LigerMegatronRMSNorm(config(layernorm_zero_centered_gamma=centered == "config", sequence_parallel=True), 48, 1e-5,
                                      zero_centered_gamma=centered == "argument").to(device)
    start = 0.0 if centered else 1.0
    assert (norm.weight == start).all() and norm.hidden_size == torch.Size([48]) and norm.eps == 1e-5
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 48, device=device, requires_grad=True)
    before = x.detach().clone()
    y = norm(x)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (48,), norm.weight + (1 if centered else 0), 1e-5))
    y.square().sum().backward()
    assert norm.weight.grad.isfinite().all() and torch.equal(x.detach(), before)
    norm.reset_parameters()
    assert (norm.weight == start).all()
    assert f"hidden_size=(48,), eps=1e-05, zero_centered_gamma={bool(centered)}" in repr(norm)


def test_rms_norm_options():
    assert liger.LigerMegatronRMSNorm(config(), 8).weight.sequence_parallel is False
    assert liger.LigerMegatronRMSNorm(config(sequence_parallel=1), 8).weight.sequence_parallel is True
    norm, x = liger.LigerMegatronRMSNorm(config(), (4, 6)), torch.randn(3, 4, 6)
    assert norm.hidden_size == torch.Size([4, 6])
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (4, 6), eps=1e-5))
    with pytest.raises(ValueError, match="'LayerNorm', expected 'RMSNorm'"):
        liger.LigerMegatronRMSNorm(config(normalization="LayerNorm"), 8)


@each_device
def test_swiglu(device):
    module = liger.LigerMegatronSwiGLU()
    for shape in ((6, 32), (3, 2, 32)):
        x = torch.randn(shape, device=device, requires_grad=True)
        y = module(x, None, False, False)
        torch.testing.assert_close(y, swiglu(x))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), torch.autograd.grad(swiglu(x).sum(), x))
    x = torch.randn(4, 6, device=device, requires_grad=True)
    over = torch.autograd.grad(liger.LigerMegatronSwiGLU(in_place=True)(x * 1).sum(), x)
    torch.testing.assert_close(over, torch.autograd.grad(swiglu(x).sum(), x))
    for shape, text in (((6,), "two or three"), ((1, 2, 3, 4), "two or three"), ((3, 5), "even last dimension")):
        with pytest.raises(ValueError, match=text):
            module(torch.randn(shape))


def test_swiglu_fallback(caplog):
    x, bias = torch.randn(2, 8), torch.randn(8)
    for arguments, name in (((bias,), "bias"), ((None, True), "fp8_input_store"), ((None, False, True), "cpu_offload_input")):
        with pytest.raises(RuntimeError, match=f"{name} is not supported"):
            liger.LigerMegatronSwiGLU()(x, *arguments)
    calls = []
    module = liger.LigerMegatronSwiGLU(lambda *arguments: calls.append(arguments) or "theirs")
    for _ in range(2):
        assert module(x, bias) == module(x, None, True) == module(x, None, False, True) == "theirs"
    assert len(caplog.records) == 3 and [c[1:] for c in calls[:3]] == [(bias, False, False), (None, True, False), (None, False, True)]


def test_cross_entropy_defaults():
    """Megatron's smoothing: a K / (K - 1), the mean over the rank's own columns."""
    logits, target = torch.randn(4, 3, 10), torch.randint(0, 10, (4, 3))
    loss = liger.LigerMegatronCrossEntropy(label_smoothing=0.1)
    assert (loss.label_smoothing_formula, loss.label_smoothing_mode) == ("megatron", "partition")
    logp = logits.log_softmax(-1)
    a = 0.1 * 10 / 9
    want = -(1 - a) * logp.gather(-1, target[..., None])[..., 0] - a * logp.mean(-1)
    torch.testing.assert_close(loss(logits, target), want)
    with pytest.raises(ValueError, match="'mean'"):
        liger.LigerMegatronCrossEntropy(reduction="mean")


# --- apply_liger_kernel_to_megatron ---------------------------------------------------------------------------------------------


class WrappedTorchNorm:
    def __new__(cls, config, hidden_size, eps=1e-5, **kwargs):
        return "theirs", hidden_size, eps


class LocalSpecProvider:
    def layer_norm(self, rms_norm=False, for_qk=False):
        """Megatron's."""
        return "theirs", rms_norm, for_qk


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=None):
    return "fused"


def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0, tp_group=None):
    return "unfused"


class SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, fp8_input_store, cpu_offload_input):
        return torch.full_like(input, 7.0)


@pytest.fixture
def megatron(monkeypatch):
    """{path after megatron.core.: module}, each importable."""
    modules = {
        "models.backends": {"LocalSpecProvider": type("LocalSpecProvider", (), dict(vars(LocalSpecProvider))),
                            "_fused_ce": fused_vocab_parallel_cross_entropy},
        "models.common.language_module.language_module": {"fused_vocab_parallel_cross_entropy": fused_vocab_parallel_cross_entropy},
        "transformer.transformer_block": {"LayerNormImpl": WrappedTorchNorm},
        "transformer.torch_norm": {"WrappedTorchNorm": WrappedTorchNorm},
        "fusions.fused_cross_entropy": {"fused_vocab_parallel_cross_entropy": fused_vocab_parallel_cross_entropy},
        "fusions.fused_bias_swiglu": {"SwiGLUFunction": SwiGLUFunction},
        "tensor_parallel": {"vocab_parallel_cross_entropy": vocab_parallel_cross_entropy},
        "tensor_parallel.cross_entropy": {"vocab_parallel_cross_entropy": vocab_parallel_cross_entropy},
    }
    made = {}
    for path, names in modules.items():
        parts = ["megatron", "core", *path.split(".")]
        for i in range(1, len(parts) + 1):
            full = ".".join(parts[:i])
            if full not in made:
                made[full] = types.ModuleType(full)
                made[full].__path__ = []
                monkeypatch.setitem(sys.modules, full, made[full])
        vars(made[".".join(parts)]).update(names)
    return {path: made[f"megatron.core.{path}"] for path in modules}


def test_apply_rms_norm(megatron):
    provider = megatron["models.backends"].LocalSpecProvider
    original = provider.layer_norm
    liger.apply_liger_kernel_to_megatron()
    ours, block = provider.layer_norm, megatron["transformer.transformer_block"].LayerNormImpl
    assert ours.__liger_patched__ and ours.__wrapped__ is original and block.__liger_patched__ and block.__wrapped__ is WrappedTorchNorm
    assert provider().layer_norm(rms_norm=True, has_residual=True) is liger.LigerMegatronRMSNorm
    assert provider().layer_norm() == ("theirs", False, False) and provider().layer_norm(for_qk=True) == ("theirs", False, True)
    norm = block(config(normalization="RMSNorm"), 16, 1e-6, zero_centered_gamma=True, persist_layer_norm=True)
    assert type(norm) is liger.LigerMegatronRMSNorm and norm.eps == 1e-6 and norm.zero_centered_gamma
    assert block(config=config(normalization="LayerNorm"), hidden_size=16) == ("theirs", 16, 1e-5)
    liger.apply_liger_kernel_to_megatron()
    assert provider.layer_norm is ours and megatron["transformer.transformer_block"].LayerNormImpl is block
    assert megatron["fusions.fused_bias_swiglu"].SwiGLUFunction is SwiGLUFunction
    assert megatron["tensor_parallel"].vocab_parallel_cross_entropy is vocab_parallel_cross_entropy


def test_apply_rms_norm_keeps_another_block_norm(megatron):
    other = megatron["transformer.transformer_block"].LayerNormImpl = object()
    liger.apply_liger_kernel_to_megatron()
    assert megatron["transformer.transformer_block"].LayerNormImpl is other


def test_apply_cross_entropy(megatron):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            liger.apply_liger_kernel_to_megatron(rms_norm=False, cross_entropy=True)
    fused = megatron["fusions.fused_cross_entropy"].fused_vocab_parallel_cross_entropy
    unfused = megatron["tensor_parallel.cross_entropy"].vocab_parallel_cross_entropy
    assert fused.__liger_patched__ and fused.__wrapped__ is fused_vocab_parallel_cross_entropy
    assert unfused.__liger_patched__ and unfused.__wrapped__ is vocab_parallel_cross_entropy
    assert megatron["models.backends"]._fused_ce is fused and megatron["tensor_parallel"].vocab_parallel_cross_entropy is unfused
    assert megatron["models.common.language_module.language_module"].fused_vocab_parallel_cross_entropy is fused
    logits, target = torch.randn(4, 3, 10), torch.randint(0, 10, (4, 3))
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(4, 3)
    for result in (fused(logits, target), unfused(logits, target), unfused(logits, target, 0.0), fused(logits, target, tp_group=None)):
        torch.testing.assert_close(result, plain)
    smoothed = liger.LigerMegatronCrossEntropy(label_smoothing=0.2)(logits, target)
    torch.testing.assert_close(unfused(logits, target, label_smoothing=0.2), smoothed)
    assert megatron["models.backends"].LocalSpecProvider.layer_norm is vars(LocalSpecProvider)["layer_norm"]


def test_apply_cross_entropy_respects_other_patches(megatron):
    """A caller that holds somebody else's function keeps it; nobody reached is said."""
    theirs = megatron["models.backends"]._fused_ce = lambda *a: None
    megatron["models.common.language_module.language_module"].fused_vocab_parallel_cross_entropy = theirs
    with pytest.warns(UserWarning, match="language_module.fused_vocab_parallel_cross_entropy"):
        liger.apply_liger_kernel_to_megatron(rms_norm=False, cross_entropy=True)
    assert megatron["models.backends"]._fused_ce is theirs


def test_apply_swiglu(megatron):
    for _ in range(2):
        liger.apply_liger_kernel_to_megatron(rms_norm=False, swiglu=True)
    ours = megatron["fusions.fused_bias_swiglu"].SwiGLUFunction
    assert ours.__liger_patched__ and ours.__wrapped__ is SwiGLUFunction
    x = torch.randn(3, 2, 8)
    torch.testing.assert_close(ours.apply(x, False, False), swiglu(x))
    torch.testing.assert_close(ours.apply(x), swiglu(x))
    assert (ours.apply(x, True, False) == 7).all() and (ours.apply(x, cpu_offload_input=True) == 7).all()


def test_apply_is_whole_or_nothing(megatron, monkeypatch):
    """A name that is missing is an ImportError that says which, before anything is replaced."""
    del megatron["fusions.fused_bias_swiglu"].SwiGLUFunction
    with pytest.raises(ImportError, match="megatron.core.fusions.fused_bias_swiglu.SwiGLUFunction is missing"):
        liger.apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)
    assert megatron["transformer.transformer_block"].LayerNormImpl is WrappedTorchNorm
    assert megatron["models.backends"]._fused_ce is fused_vocab_parallel_cross_entropy
    monkeypatch.setitem(sys.modules, "megatron.core.transformer.torch_norm", None)
    with pytest.raises(ImportError, match="megatron.core.transformer.torch_norm"):
        liger.apply_liger_kernel_to_megatron()
