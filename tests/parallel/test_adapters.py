"""PEFT on patched models, beyond the heads of tests/test_patch_heads.py: embeddings, quantised base weights, under DDP and FSDP 2."""

import copy

import pytest
import torch
from ranks import DEVICE
from training import assert_same, inputs, model_of, patch, train

peft = pytest.importorskip("peft")


class Linear8(torch.nn.Linear):
    """As quantising libraries have it: a subclass of Linear whose weight is a parameter of integers that only its forward can read."""

    def __init__(self, linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = torch.nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def quantise(model, head):
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and (head or name != "lm_head"):
            model.set_submodule(name, Linear8(module))


def adapted(model, **config):
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **config)).train()


CONFIGS = {
    "attention": dict(target_modules=["q_proj", "v_proj"]),
    "mlp": dict(target_modules=["gate_proj", "up_proj", "down_proj"]),
    "head": dict(target_modules=["q_proj", "lm_head"]),
    "embeddings": dict(target_modules=["embed_tokens", "lm_head"]),
    "saved": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head", "norm", "input_layernorm"]),
    "some tokens": dict(target_modules=["q_proj"], trainable_token_indices=[5, 7, 11]),
}


def step(model):
    model.zero_grad(set_to_none=True)
    out = model(**{name: t.cpu() for name, t in inputs(0).items()})
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_step(ours, theirs):
    torch.testing.assert_close(ours[0].loss, theirs[0].loss, rtol=1e-5, atol=0)
    assert ours[1].keys() == theirs[1].keys() and theirs[1]
    for name, want in theirs[1].items():
        assert (ours[1][name] - want).abs().max() <= 1e-4 * want.abs().max() + 1e-12, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_lora(name, tied):
    start = model_of(tie_word_embeddings=tied)
    theirs = step(adapted(copy.deepcopy(start), **CONFIGS[name]))
    for order in ("before", "after"):
        model = copy.deepcopy(start)
        if order == "before":
            patch(model)
        wrapped = adapted(model, **CONFIGS[name])
        if order == "after":
            patch(model)
        assert_step(step(wrapped), theirs)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", ["attention", "mlp", "head"])
def test_quantised_base(name, head, caplog):
    """Integers are nobody's head: the loss of a quantised head comes from its own logits; everything else is patched."""
    start = model_of()
    quantise(start, head)
    plain = adapted(copy.deepcopy(start), **CONFIGS[name])
    theirs = step(plain)
    model = copy.deepcopy(start)
    wrapped = adapted(model, **CONFIGS[name])
    before = {n: (type(m), m.weight.clone()) for n, m in model.named_modules() if isinstance(m, Linear8)}
    report = patch(model)
    ours = step(wrapped)
    assert_step(ours, theirs)
    for n, (cls, weight) in before.items():
        module = model.get_submodule(n)
        assert type(module) is cls and "forward" not in vars(module) and torch.equal(module.weight, weight), n
    assert report is not None and "LigerRMSNorm" in repr(model) and "LigerSwiGLUMLP" in repr(model)


def under_ddp(name):
    from test_data_parallel import wrap

    runs = []
    for patched in (False, True):
        model = model_of().to(DEVICE)
        wrapped = adapted(model, **CONFIGS[name]).to(DEVICE)
        if patched:
            patch(model)
        runs.append(train(wrapped, wrap(wrapped)))
    assert_same(runs[1], runs[0])


@pytest.mark.parametrize("name", ["mlp", "head", "saved"])
def test_ddp(ranks, name):
    ranks(under_ddp, name)


def under_fsdp2(name):
    import test_fsdp2

    runs = []
    for patched in (False, True):
        model = model_of().to(DEVICE)
        wrapped = adapted(model, **CONFIGS[name]).to(DEVICE)
        if patched:
            patch(model)
        mesh = torch.distributed.init_device_mesh(DEVICE, (torch.distributed.get_world_size(),))
        for unit in [*model.model.layers, model.lm_head, wrapped]:
            test_fsdp2.fully_shard(unit, mesh=mesh)
        runs.append(train(wrapped))
    assert_same(runs[1], runs[0])


@pytest.mark.parametrize("name", ["mlp", "head", "saved"])
def test_fsdp2(ranks, name):
    ranks(under_fsdp2, name)
