"""What other projects import from liger_kernel and how they call it, by their released versions, without installing them.

Rows whose consumer patches classes take the patch back: it holds for the process."""

import importlib
import inspect
import sys

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from liger_kernel.patch import compare, tiny, unpatch


def take(path):
    """The object at "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.fixture(autouse=True)
def restored():
    yield
    unpatch()


# --- imports -------------------------------------------------------------------------------------------------------------------

IMPORTS = {
    "transformers 5.24": "liger_kernel.transformers:_apply_liger_kernel_to_instance",
    "transformers 4.45": "liger_kernel.transformers.trainer_integration:_apply_liger_kernel",
    "axolotl 0.19.0": """
        liger_kernel.transformers.cross_entropy:LigerCrossEntropyLoss liger_kernel.transformers.functional:liger_cross_entropy
        liger_kernel.transformers.layer_norm:LigerLayerNorm liger_kernel.transformers.monkey_patch:MODEL_TYPE_TO_APPLY_LIGER_FN
        liger_kernel.transformers.rms_norm:LigerRMSNorm liger_kernel.transformers.rope:liger_rotary_pos_emb
        liger_kernel.transformers.swiglu:LigerSwiGLUMLP liger_kernel.transformers.geglu:LigerGEGLUMLP
        liger_kernel.transformers.rms_norm:LigerRMSNormForGemma2 liger_kernel.transformers.rms_norm:LigerRMSNormForGemma4
        liger_kernel.transformers.model.loss_utils:LigerForCausalLMLoss liger_kernel.utils:PEFT_AVAILABLE
        liger_kernel.utils:is_npu_available liger_kernel.ops.utils:calculate_settings liger_kernel.ops.utils:compare_version
        liger_kernel.ops.utils:ensure_contiguous liger_kernel.ops.utils:torch_to_triton_dtype
        liger_kernel.ops.fused_linear_cross_entropy:fused_linear_cross_entropy_forward
        liger_kernel.ops.fused_linear_cross_entropy:fused_linear_cross_entropy_backward""",
    "axolotl 0.19.0 (other models with the fused loss)": "liger_kernel.transformers.trainer.orpo_trainer:_FSDPForwardRedirection",
    "axolotl 0.19.0 (liger_kernel_impl)": "liger_kernel.ops.backends.registry:IMPL_REGISTRY",
    "axolotl 0.19.0 (GRPO)": "liger_kernel.ops.grpo_loss:fused_selective_log_softmax",
    "axolotl 0.19.0 (distillation)": "liger_kernel.chunked_loss.fused_linear_distillation:LigerFusedLinearDistillationBase",
    "llamafactory 0.9.5": " ".join(f"liger_kernel.transformers:apply_liger_kernel_to_{name}" for name in (
        "gemma gemma2 gemma3 gemma3_text glm4 glm4v granite llama llava mistral mixtral mllama olmo2 paligemma phi3 qwen2 qwen2_vl "
        "qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_5 gpt_oss qwen3_5_text qwen3_5_moe qwen3_5_moe_text").split()),
    "ms-swift 4.6.0": " ".join(f"liger_kernel.transformers:apply_liger_kernel_to_{name}" for name in (
        "gemma llama mistral mixtral mllama phi3 qwen2 qwen2_5_vl qwen2_vl qwen3 gemma3 gemma3_text glm4 glm4v glm4v_moe internvl llama4 "
        "llava paligemma qwen3_moe qwen3_next").split()),
    "ms-swift 4.6.0 (GKD)": "liger_kernel.chunked_loss:LigerFusedLinearJSDLoss",
    "ms-swift 4.6.0 (GRPO)": "liger_kernel.chunked_loss:LigerFusedLinearGRPOLoss",
    "trl 1.12 (GRPO, DPO, KTO)": "liger_kernel.chunked_loss:LigerFusedLinearGRPOLoss liger_kernel.chunked_loss:LigerFusedLinearDPOLoss "
                                 "liger_kernel.chunked_loss:LigerFusedLinearKTOLoss",
    "verl 0.9.1": "liger_kernel.transformers.monkey_patch:_apply_liger_kernel_to_instance "
                  "liger_kernel.ops:LigerFusedLinearScaledCrossEntropyFunction",
    "OpenRLHF 0.11.2": "liger_kernel.transformers:AutoLigerKernelForCausalLM",
    "oumi 0.9": "liger_kernel.transformers:_apply_liger_kernel",
    "Megatron-LM (proposal)": "liger_kernel.megatron:LigerMegatronRMSNorm liger_kernel.megatron:LigerMegatronSwiGLU "
                              "liger_kernel.megatron:LigerMegatronCrossEntropy liger_kernel.megatron:apply_liger_kernel_to_megatron",
    "VeOmni": "liger_kernel.transformers.rms_norm:LigerRMSNorm liger_kernel.transformers.swiglu:LigerSwiGLUMLP "
              "liger_kernel.ops:LigerRMSNormFunction liger_kernel.ops:LigerSiLUMulFunction "
              "liger_kernel.transformers:LigerFusedLinearCrossEntropyLoss liger_kernel.transformers.rope:liger_rotary_pos_emb",
}


@pytest.mark.parametrize("consumer", IMPORTS)
def test_imports(consumer):
    for path in IMPORTS[consumer].split():
        assert take(path) is not None


def test_version_and_distribution():
    """transformers, trl, ms-swift and LLaMA-Factory read the version of the distribution liger-kernel; oumi takes < 0.9."""
    from importlib.metadata import version

    from packaging.version import Version
    from transformers.utils import is_liger_kernel_available

    import liger_kernel

    assert is_liger_kernel_available()
    for text in (version("liger-kernel"), liger_kernel.__version__):
        assert Version("0.8.2") <= Version(text) < Version("0.9")


# --- calls ---------------------------------------------------------------------------------------------------------------------


def run_of(model):
    return compare.run(model, **compare.inputs())


def close(model, model_type):
    """The patched model's training step is that of a plain one of the same seed."""
    ours = run_of(model)
    unpatch()
    distance = compare.distance(ours, run_of(tiny.causal_lm(model_type)))
    assert max(distance.logits, distance.loss, distance.gradients) < 1e-5, distance


def axolotl_dispatch(model_type):
    """By keyword, only names of the signature, values may be None, no model; before the model is built."""
    function = take("liger_kernel.transformers.monkey_patch:MODEL_TYPE_TO_APPLY_LIGER_FN")[model_type]
    wanted = {"rope": True, "cross_entropy": None, "fused_linear_cross_entropy": True, "rms_norm": True, "layer_norm": None}
    wanted.update({"geglu": True} if "geglu" in inspect.signature(function).parameters else {"swiglu": True})
    function(**{name: value for name, value in wanted.items() if name in inspect.signature(function).parameters})
    close(tiny.causal_lm(model_type), model_type)


def axolotl_kernel_impl():
    """Which implementation is loaded: the first entry whose module is. None here, where LIGER_KERNEL_IMPL chose none; axolotl then
    refuses to choose another, and otherwise sets the variable before the first import."""
    registry = take("liger_kernel.ops.backends.registry:IMPL_REGISTRY")
    assert {"cutile", "cutedsl"} <= set(registry)
    assert next((name for name, info in registry.items() if info.module_path in sys.modules), None) is None


def axolotl_qwen3_5():
    """Subclasses of LigerRMSNorm and a copy of the configuration for LigerSwiGLUMLP."""
    norm = take("liger_kernel.transformers.rms_norm:LigerRMSNorm")

    class Norm(norm):
        def __init__(self, dim, eps=1e-6):
            super().__init__(dim, eps=eps, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False)

    x = torch.randn(3, 64)
    torch.testing.assert_close(Norm(64)(x), nn.functional.rms_norm(x, (64,), eps=1e-6))
    config = tiny.config("llama")
    assert take("liger_kernel.transformers.swiglu:LigerSwiGLUMLP")(config)(torch.randn(2, 64)).shape == (2, 64)


def axolotl_gemma4():
    """Classes whose __new__ returns an object of another class, and keyword with_scale."""
    base = take("liger_kernel.transformers.rms_norm:LigerRMSNormForGemma4")

    class Norm(base):
        def __new__(cls, dim, eps=1e-6, with_scale=True):
            return base(dim, eps, with_scale=with_scale)

    assert Norm(64)(torch.randn(2, 64)).shape == (2, 64) and Norm(64, with_scale=False).weight is None


def axolotl_layer_norm():
    """Stands in for nn.LayerNorm in a modelling module."""
    cls = take("liger_kernel.transformers.layer_norm:LigerLayerNorm")
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(cls(64, eps=1e-5)(x), nn.functional.layer_norm(x, (64,), eps=1e-5))


def axolotl_cross_entropy():
    """Stands in for nn.functional.cross_entropy in transformers' loss_utils."""
    ours = take("liger_kernel.transformers.functional:liger_cross_entropy")
    logits, labels = torch.randn(6, 11), torch.tensor([1, 2, -100, 4, 5, 6])
    for options in ({}, {"ignore_index": -100, "reduction": "sum"}, {"reduction": "mean", "label_smoothing": 0.1}):
        torch.testing.assert_close(ours(logits, labels, **options), nn.functional.cross_entropy(logits, labels, **options))


def axolotl_token_scaling(monkeypatch):
    """Rebinds the functional to a wrapper with (*args, **kwargs), and the module's constructor."""
    functional = importlib.import_module("liger_kernel.transformers.functional")
    original, seen = functional.liger_fused_linear_cross_entropy, []

    def wrapper(*args, **kwargs):
        seen.append(kwargs)
        return original(*args, **{**kwargs, "use_token_scaling": True})

    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", wrapper)
    cls = take("liger_kernel.transformers.fused_linear_cross_entropy:LigerFusedLinearCrossEntropyLoss")
    init = cls.__init__
    monkeypatch.setattr(cls, "__init__", lambda self, *args, **kwargs: init(self, *args, **{**kwargs, "use_token_scaling": True}))
    model = tiny.causal_lm("llama")
    take("liger_kernel.transformers:_apply_liger_kernel_to_instance")(model=model)
    run_of(model)
    assert seen and cls().use_token_scaling


def axolotl_compile(monkeypatch):
    """Wraps the op's two functions by getattr and setattr."""
    op = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    for name in ("fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"):
        monkeypatch.setattr(op, name, torch.compiler.disable(getattr(op, name)))


def axolotl_generic_forward():
    """A plain tensor comes back, with shift_labels given and without."""
    loss = take("liger_kernel.transformers.model.loss_utils:LigerForCausalLMLoss")
    hidden, weight, labels = torch.randn(2, 5, 16), torch.randn(30, 16), torch.randint(0, 30, (2, 5))
    for shift in (None, labels):
        assert torch.is_tensor(loss(hidden_states=hidden, lm_head_weight=weight, labels=labels, hidden_size=16, shift_labels=shift,
                                    num_items_in_batch=torch.tensor(8)))


def axolotl_log_softmax():
    """(B, L + 1, V) contiguous logits, ids, temperature."""
    function = take("liger_kernel.ops.grpo_loss:fused_selective_log_softmax")
    logits, ids = torch.randn(2, 6, 30), torch.randint(0, 30, (2, 5))
    with torch.no_grad():
        result = function(logits, ids, 0.9)
    torch.testing.assert_close(result, (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[..., None])[..., 0], check_dtype=False)


def llamafactory_v0(require_logits):
    """No arguments, or the plain loss where logits are needed; before the model is built."""
    function = take("liger_kernel.transformers:apply_liger_kernel_to_qwen3")
    if require_logits and "fused_linear_cross_entropy" in inspect.signature(function).parameters:
        function(fused_linear_cross_entropy=False, cross_entropy=True)
    else:
        function()
    close(tiny.causal_lm("qwen3"), "qwen3")


def llamafactory_v1(name):
    """Every toggle of the signature by keyword, and the model."""
    function = getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{name}")
    toggles = {p.name: bool(p.default) for p in inspect.signature(function).parameters.values() if p.name != "model"}
    model = tiny.causal_lm(name)
    function(model=model, **toggles)
    run_of(model)
    unpatch(model)


def swift_loss(monkeypatch):
    """The loss is replaced by a wrapper after forwards were imported; it drops the packing arguments."""
    loss_utils = importlib.import_module("liger_kernel.transformers.model.loss_utils")
    original, calls = loss_utils.LigerForCausalLMLoss, []
    model = tiny.causal_lm("llama")
    take("liger_kernel.transformers:_apply_liger_kernel_to_instance")(model=model)

    def wrapper(hidden_states, *args, **kwargs):
        calls.append(kwargs)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
            kwargs.pop(name, None)
        return original(hidden_states.contiguous(), *args, **kwargs)

    monkeypatch.setattr(loss_utils, "LigerForCausalLMLoss", wrapper)
    close(model, "llama")
    assert calls


def verl_fsdp():
    """Right after loading; verl replaces the model's forward itself."""
    model = tiny.causal_lm("qwen2")
    take("liger_kernel.transformers.monkey_patch:_apply_liger_kernel_to_instance")(
        model=model, fused_linear_cross_entropy=False, swiglu=True)
    assert model(compare.inputs()["input_ids"]).logits is not None
    close(model, "qwen2")


def verl_scaled_loss():
    """hidden (M, H), weights (V, H), ids (M,), temperature, ignored id, 1, with entropy -> (nll, entropy) of each row."""
    function = take("liger_kernel.ops:LigerFusedLinearScaledCrossEntropyFunction")
    hidden, weight, ids = torch.randn(6, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True), torch.randint(0, 30, (6,))
    nll, entropy = function.apply(hidden, weight, ids, 0.7, -100, 1, True)
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    torch.testing.assert_close(nll, -log_p.gather(1, ids[:, None])[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropy.float(), -(log_p.exp() * log_p).sum(-1), rtol=1e-4, atol=1e-4)
    (nll.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def openrlhf(tmp_path):
    """The arguments of AutoModelForCausalLM.from_pretrained; logits without labels."""
    tiny.causal_lm("llama").save_pretrained(tmp_path)
    model = take("liger_kernel.transformers:AutoLigerKernelForCausalLM").from_pretrained(
        str(tmp_path), trust_remote_code=True, attn_implementation="eager", quantization_config=None, torch_dtype=torch.bfloat16,
        device_map=None)
    assert model.dtype == torch.bfloat16 and "LigerRMSNorm" in repr(model)
    assert model(compare.inputs()["input_ids"]).logits.shape == (3, 19, 1000)


def oumi():
    """The class-level patch, after the model was built."""
    model = tiny.causal_lm("llama")
    take("liger_kernel.transformers:_apply_liger_kernel")("llama")
    close(model, "llama")


def automodel():
    """Any HF model, by keyword, no options."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{k: v for k, v in tiny.config("llama").to_diff_dict().items()
                                                                              if k not in ("model_type", "transformers_version")}))
    take("liger_kernel.transformers:_apply_liger_kernel_to_instance")(model=model)
    assert "LigerRMSNorm" in repr(model)
    unpatch(model)


def veomni():
    """Functions by position, and class strings."""
    x, w = torch.randn(2, 3, 64), torch.randn(64)
    norm = take("liger_kernel.ops:LigerRMSNormFunction").apply
    torch.testing.assert_close(norm(x, w, 1e-6, 0.0, "llama", False, None), nn.functional.rms_norm(x, (64,), w, 1e-6))
    torch.testing.assert_close(norm(x, w, 1e-6, 1.0, "gemma", False, None), nn.functional.rms_norm(x, (64,), 1 + w, 1e-6))
    torch.testing.assert_close(take("liger_kernel.ops:LigerSiLUMulFunction").apply(x, 2 * x), nn.functional.silu(x) * 2 * x)
    hidden, weight, labels = torch.randn(6, 16), torch.randn(30, 16), torch.randint(0, 30, (6,))
    loss = take("liger_kernel.transformers:LigerFusedLinearCrossEntropyLoss")(reduction="mean")(weight, hidden, labels)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(hidden @ weight.T, labels))
    q, k, angles = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 5, 8)
    cos, sin = angles.cos().repeat(1, 1, 2), angles.sin().repeat(1, 1, 2)
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.testing.assert_close(take("liger_kernel.transformers.rope:liger_rotary_pos_emb")(q, k, cos, sin),
                               apply_rotary_pos_emb(q, k, cos, sin), rtol=1e-5, atol=1e-5)


CALLS = {
    **{f"axolotl: {t}": (axolotl_dispatch, t) for t in ("llama", "gemma2", "qwen3_moe", "phi3", "olmo2", "granite")},
    "axolotl: qwen3_5": (axolotl_qwen3_5,), "axolotl: gemma4_unified": (axolotl_gemma4,), "axolotl: LayerNorm": (axolotl_layer_norm,),
    "axolotl: cross entropy": (axolotl_cross_entropy,), "axolotl: token scaling": (axolotl_token_scaling,),
    "axolotl: torch_compile": (axolotl_compile,), "axolotl: other models": (axolotl_generic_forward,),
    "axolotl: liger_kernel_impl": (axolotl_kernel_impl,), "axolotl: async GRPO": (axolotl_log_softmax,),
    "llamafactory v0: sft": (llamafactory_v0, False), "llamafactory v0: with logits": (llamafactory_v0, True),
    **{f"llamafactory v1: {t}": (llamafactory_v1, t) for t in ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
    "ms-swift: loss": (swift_loss,), "verl: FSDP engine": (verl_fsdp,), "verl: scaled cross entropy": (verl_scaled_loss,),
    "OpenRLHF": (openrlhf,), "oumi": (oumi,), "NeMo-Automodel": (automodel,), "VeOmni": (veomni,),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name, request):
    function, *arguments = CALLS[name]
    fixtures = {parameter: request.getfixturevalue(parameter) for parameter in inspect.signature(function).parameters
                if parameter in ("tmp_path", "monkeypatch")}
    function(*arguments, **fixtures)


def test_import_is_cheap():
    """Neither the package nor a CUDA context is needed to import it: data loaders fork."""
    import subprocess

    code = ("import sys, liger_kernel, liger_kernel.transformers\n"
            "assert not {'transformers', 'trl', 'peft', 'triton'} & set(sys.modules), sorted(sys.modules)\n"
            "import torch; assert not torch.cuda.is_initialized()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
