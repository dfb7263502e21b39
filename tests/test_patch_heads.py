"""Heads that are not a plain `lm_head.weight`: PEFT, FSDP, DTensor, scaled and capped logits, router losses, rebound functions."""

import copy

import pytest
import torch

from liger_kernel.patch import patch_model, tiny, unpatch
from liger_kernel.patch.causal_lm import PatchedForward
from liger_kernel.patch.specs import Head, Model
from liger_kernel.transformers import functional
from liger_kernel.transformers.model import loss_utils


@pytest.fixture(autouse=True)
def _undo():
    yield
    unpatch()


def data():
    ids = torch.randint(3, 1000, (2, 13), generator=torch.Generator().manual_seed(0))
    return dict(input_ids=ids, labels=ids)


def run(model, **extra):
    model.zero_grad(set_to_none=True)
    out = model(**data(), **extra)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs, tolerance=3e-5):
    torch.testing.assert_close(ours[0].loss, theirs[0].loss, rtol=1e-5, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    for name, want in theirs[1].items():
        assert (ours[1][name] - want).abs().max() <= tolerance * want.abs().max() + 1e-12, name


def with_peft(**config):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.causal_lm("llama"), peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.train()


@pytest.mark.parametrize("config", [
    dict(r=4, target_modules=["q_proj", "gate_proj", "lm_head"]),
    dict(r=4, target_modules=["lm_head"], lora_bias=True),
    dict(r=4, target_modules=["v_proj"], modules_to_save=["lm_head"]),
    dict(r=4, target_modules=["lm_head"], use_dora=True),
], ids=["lora", "lora-bias", "modules-to-save", "dora"])
def test_peft(config, caplog):
    """C45: an adapter on the head takes part in the loss and gets its gradient; one that cannot be fused says so."""
    model = with_peft(**config)
    theirs = run(model)
    patch_model(model.base_model.model)
    ours = run(model)
    assert ours[0].logits is None
    assert_same(ours, theirs)
    assert any("lm_head" in name for name in ours[1])
    assert ("cannot be fused" in caplog.text) == bool(config.get("use_dora"))
    with model.disable_adapter():
        plain = model(**data()).loss
    torch.testing.assert_close(plain, tiny.causal_lm("llama")(**data()).loss, rtol=1e-5, atol=0)


def test_lora_dropout_and_merge():
    model = with_peft(r=4, target_modules=["lm_head"], lora_dropout=0.5)
    torch.manual_seed(7)
    theirs = run(model)
    patch_model(model.base_model.model)
    torch.manual_seed(7)
    assert_same(run(model), theirs)
    model.eval()
    before = model(**data(), skip_logits=True).loss
    model.merge_adapter()
    torch.testing.assert_close(model(**data(), skip_logits=True).loss, before, rtol=1e-5, atol=0)


def test_patched_before_peft():
    """The other order: a patched model that is wrapped later."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "lm_head"])
    torch.manual_seed(0)
    theirs = run(peft.get_peft_model(tiny.causal_lm("llama"), config).train())
    model = tiny.causal_lm("llama")
    patch_model(model)
    torch.manual_seed(0)
    assert_same(run(peft.get_peft_model(model, config).train()), theirs)


def test_norm_in_modules_to_save():
    """Every adapter's copy of a wrapped norm is patched."""
    model = with_peft(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    theirs = run(model)
    patch_model(model.base_model.model)
    wrapper = model.base_model.model.model.norm
    assert all(m._get_name() == "LigerRMSNorm" for m in (wrapper.original_module, *wrapper.modules_to_save.values()))
    assert_same(run(model), theirs)


def test_head_with_bias():
    plain = tiny.causal_lm("llama").train()
    plain.lm_head.bias = torch.nn.Parameter(0.1 * torch.randn(1000))
    model = copy.deepcopy(plain)
    patch_model(model)
    assert_same(run(model), run(plain))


def test_foreign_head(caplog):
    """A head that is no plain Linear (quantised, say) is called, not read around."""

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    plain = tiny.causal_lm("llama").train()
    head = Doubled(64, 1000, bias=False)
    head.load_state_dict(plain.lm_head.state_dict())
    plain.lm_head = head
    model = copy.deepcopy(plain)
    patch_model(model)
    ours = run(model)
    assert ours[0].logits is None
    assert_same(ours, run(plain))


def doubled(*args):
    return 2 * args[-1]


def _hook(register, function):
    def change(head):
        handle = getattr(head, register)(function)
        return handle.remove

    return change


def _own_forward(head):
    head.forward = lambda x: 2 * type(head).forward(head, x)


def _weight_norm(head):
    torch.nn.utils.weight_norm(head)  # a hook makes the weight at each call
    head.weight_g.data.mul_(2)


INTERCEPTED = {
    "forward hook": _hook("register_forward_hook", doubled),
    "forward pre-hook": _hook("register_forward_pre_hook", lambda module, args: (2 * args[0],)),
    "backward hook": _hook("register_full_backward_hook", lambda module, into, out: tuple(2 * g for g in into)),
    "backward pre-hook": _hook("register_full_backward_pre_hook", lambda module, out: tuple(2 * g for g in out)),
    "forward": _own_forward,
    "weight_norm": _weight_norm,
    "global hook": lambda head: torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 2 * out if module.__class__ is torch.nn.Linear and module.out_features == 1000 else None).remove,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("how", INTERCEPTED)
def test_intercepted_head(how, caplog, monkeypatch):
    """What others hang on the head runs: the loss is then computed from logits, and one warning says so."""
    from liger_kernel.patch import head_weight

    monkeypatch.setattr(head_weight, "_warned", set())
    model = tiny.causal_lm("llama").train()
    before = run(model)
    undo = INTERCEPTED[how](model.lm_head)
    theirs = run(model)
    assert not all(torch.equal(a, b) for a, b in zip(before[1].values(), theirs[1].values(), strict=False))
    patch_model(model)
    for _ in range(2):
        assert_same(run(model), theirs)
    assert [r.getMessage() for r in caplog.records].count(caplog.records[0].getMessage()) == len(caplog.records) == 1
    assert "cannot be fused" in caplog.text
    if undo:
        undo()
        assert_same(run(model), before)


def test_adapter_names(caplog):
    """PEFT's adapter_names choose an adapter for each sample, by a hook on every LoRA layer."""
    model = with_peft(r=4, target_modules=["lm_head"])
    patch_model(model.base_model.model)
    alone = model(**data()).loss
    assert "cannot be fused" not in caplog.text
    chosen = model.eval()(**data(), adapter_names=["default", "__base__"], skip_logits=True)
    both = [model(**{k: v[i : i + 1] for k, v in data().items()}, adapter_names=[name], skip_logits=True).loss
            for i, name in enumerate(["default", "__base__"])]
    torch.testing.assert_close(chosen.loss, sum(both) / 2, rtol=1e-5, atol=0)
    assert chosen.loss != alone


def test_accelerate_hook_on_the_head(caplog):
    """Hooks that only move tensors leave the loss fused."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = tiny.causal_lm("llama").train()
    theirs = run(model)
    add_hook_to_module(model.lm_head, AlignDevicesHook(execution_device="cpu"))
    patch_model(model)
    assert_same(run(model), theirs)
    assert "cannot be fused" not in caplog.text
    model.lm_head._old_forward = lambda x: 2 * torch.nn.functional.linear(x, model.lm_head.weight)
    assert model(**data()).loss != theirs[0].loss and "has been replaced" in caplog.text


SCALED = {
    "granite": dict(logits_scaling=8.0),
    "gemma2": dict(final_logit_softcapping=5.0, head_dim=16, query_pre_attn_scalar=16),
    "mixtral": dict(num_local_experts=4, output_router_logits=True),
}


@pytest.mark.parametrize("kind", SCALED)
def test_scale_cap_and_router_loss(kind):
    """The forward as other rows will use it: logit scale, soft cap, load-balancing loss, on both paths."""
    heads = {
        "granite": Head("llama", scale="1/config.logits_scaling"),
        "gemma2": Head("llama", softcap="config.final_logit_softcapping"),
        "mixtral": Head("llama", router_loss=True),
    }
    name = {"granite": "GraniteForCausalLM", "gemma2": "Gemma2ForCausalLM", "mixtral": "MixtralForCausalLM"}[kind]
    forward = PatchedForward(Model(kind, heads={name: heads[kind]}), name)

    @forward.like_original
    def lce_forward(self, *args, skip_logits=None, **kwargs):
        return forward(self, args, kwargs, skip_logits)

    plain = tiny.causal_lm(kind, **SCALED[kind]).train()
    for parameter in plain.lm_head.parameters():
        parameter.data.mul_(20)  # logits that the cap bends
    model = copy.deepcopy(plain)
    theirs = run(plain)
    model.forward = lce_forward.__get__(model)
    for extra in ({}, {"skip_logits": False}, {"skip_logits": False, "return_token_accuracy": True}):
        ours = run(model, **extra)
        assert_same(ours, theirs, 1e-4)
        if extra:
            torch.testing.assert_close(ours[0].logits, theirs[0].logits, rtol=1e-4, atol=1e-4)
        if kind == "mixtral":
            torch.testing.assert_close(ours[0].aux_loss, theirs[0].aux_loss)
            assert len(ours[0].router_logits) == 2


def test_rebound_functions(monkeypatch):
    """axolotl rebinds the fused loss in `functional`, ms-swift `LigerForCausalLMLoss` in `loss_utils`: both reach a patched model."""
    model = tiny.causal_lm("llama").train()
    patch_model(model)
    expected = model(**data(), use_token_scaling=True).loss
    calls = []
    fused = functional.liger_fused_linear_cross_entropy

    def with_token_scaling(*args, **kwargs):
        calls.append("functional")
        kwargs["use_token_scaling"] = True
        return fused(*args, **kwargs)

    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", with_token_scaling)
    torch.testing.assert_close(model(**data()).loss, expected)
    smoothed = model(**data(), label_smoothing=0.2).loss
    assert smoothed != expected, "options pass through a wrapper without named parameters"
    monkeypatch.undo()

    original = loss_utils.LigerForCausalLMLoss

    def contiguous(hidden_states, *args, **kwargs):
        calls.append("loss_utils")
        return original(hidden_states.contiguous(), *args, **kwargs)

    monkeypatch.setattr(loss_utils, "LigerForCausalLMLoss", contiguous)
    model(**data())
    assert calls == ["functional", "functional", "loss_utils"]


def test_loss_utils():
    hidden, weight = torch.randn(2, 9, 16), torch.randn(50, 16)
    labels = torch.randint(0, 50, (2, 9))
    target = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = torch.nn.functional.cross_entropy((hidden @ weight.T).reshape(-1, 50), target.reshape(-1))
    loss = loss_utils.LigerForCausalLMLoss(hidden, weight, labels, 16, unknown=1, cu_seq_lens_q=None)
    torch.testing.assert_close(loss, expected)
    strided = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(loss_utils.LigerForCausalLMLoss(strided, weight, labels, 16), expected)
    for items in (5, torch.tensor(5)):
        summed = loss_utils.LigerForCausalLMLoss(hidden, weight, labels, 16, num_items_in_batch=items, return_token_accuracy=True)
        torch.testing.assert_close(summed.loss, expected * 16 / 5)
        assert isinstance(summed, functional.CrossEntropyOutput) and summed.predicted_tokens is None
    assert loss_utils.unpack_cross_entropy_result(loss) == (loss, None, None, None)
    assert loss_utils.unpack_cross_entropy_result((loss, 1)) == (loss, 1, None, None)
    assert loss_utils.unpack_cross_entropy_result(summed)[2] is summed.token_accuracy
