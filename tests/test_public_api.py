"""Import paths, signatures and import cost of what other packages use."""

import importlib
import inspect
import subprocess
import sys
import textwrap

import pytest
import torch

import liger_kernel.transformers as liger


def python(code, **environment):
    import os

    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True,
                          env={**os.environ, **environment}).stdout


def test_import_is_cheap_and_clean():
    """Beside torch: under 0.3 s, no transformers, no triton, no native library, no CUDA."""
    out = python("""
        import sys, time
        import torch
        before = set(sys.modules)
        start = time.perf_counter()
        import liger_kernel, liger_kernel.transformers, liger_kernel.patch, liger_kernel.utils, liger_kernel.ops
        print(time.perf_counter() - start)
        print(sorted({m.split(".")[0] for m in set(sys.modules) - before}))
        assert not torch.cuda.is_initialized()
        assert "liger_kernel._native" not in sys.modules
    """)
    seconds, new = out.splitlines()
    assert float(seconds) < 0.3
    assert "transformers" not in new and "triton" not in new and "peft" not in new


def test_without_transformers():
    """Modules and functions work; names that need transformers say so; unknown names are AttributeErrors."""
    python("""
        import sys

        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("transformers", "triton", "peft"):
                    raise ModuleNotFoundError(name, name=name)

        sys.meta_path.insert(0, Block())
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name in ("transformers", "triton", "peft") else find(name, *a)
        import liger_kernel.transformers as liger
        assert not liger.is_transformers_available()
        assert liger.LigerRMSNorm(8) is not None
        import liger_kernel.transformers.functional
        for name in ("AutoLigerKernelForCausalLM", "apply_liger_kernel_to_llama", "_apply_liger_kernel_to_instance"):
            try:
                getattr(liger, name)
            except ImportError as e:
                assert name in str(e) and "transformers" in str(e)
            else:
                raise AssertionError(name)
        assert not hasattr(liger, "no_such_name")
        assert "apply_liger_kernel_to_llama" not in liger.__all__
        import liger_kernel.ops.utils as utils
        assert utils.torch_to_triton_dtype == {}
    """)


def test_all_resolves():
    assert {"LigerRMSNorm", "LigerCrossEntropyLoss", "AutoLigerKernelForCausalLM", "apply_liger_kernel_to_llama",
            "_apply_liger_kernel", "_apply_liger_kernel_to_instance", "is_transformers_available"} <= set(liger.__all__)
    namespace = {}
    exec("from liger_kernel.transformers import *", namespace)
    assert set(liger.__all__) <= set(namespace)
    assert set(liger.__all__) <= set(dir(liger))


@pytest.mark.parametrize(("module", "name"), [
    ("liger_kernel.transformers.functional", "liger_rms_norm"), ("liger_kernel.transformers.functional", "liger_cross_entropy"),
    ("liger_kernel.ops", "LigerRMSNormFunction"), ("liger_kernel.chunked_loss", "LigerFusedLinearDPOLoss"),
    ("liger_kernel.chunked_loss.functional", "liger_fused_linear_dpo")])
def test_star_imports(module, name):
    namespace = {}
    exec(f"from {module} import *", namespace)
    assert callable(namespace[name])


def test_names_that_are_not_there():
    """A public name whose op is missing says so; a name that nobody promised is an ordinary AttributeError."""
    from liger_kernel.transformers import functional

    with pytest.raises(AttributeError, match="no attribute 'LigerNothing'"):
        liger.LigerNothing  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'liger_nothing'"):
        functional.liger_nothing  # noqa: B018
    for module in (liger, functional):
        for name, home in module._HOME.items():
            try:
                getattr(module, name)
            except AttributeError as e:
                assert "not provided yet" in str(e), (name, home, e)
    with pytest.raises(AttributeError, match="not provided yet"):
        liger.apply_liger_kernel_to_no_such_model  # noqa: B018


PATHS = """
transformers.cross_entropy.LigerCrossEntropyLoss
transformers.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyLoss
transformers.experts.LigerExperts
transformers.grpo_loss.triton_grpo_loss
transformers.moe.LigerExpertParallelFusedMoe
transformers.jsd.LigerJSD
transformers.jsd.LigerJSDFunction
transformers.fused_linear_jsd.LigerFusedLinearJSD
transformers.fused_linear_jsd.LigerFusedLinearJSDFunction
transformers.fused_linear_kl_div.LigerFusedLinearKLDivLoss
transformers.kl_div.LigerKLDIVLoss
transformers.kl_div.LigerKLDivLossFunction
transformers.tvd.LigerTVDLoss
transformers.tvd.LigerTVDLossFunction
transformers.softmax.LigerSoftmax
transformers.softmax.LigerSoftmaxFunction
transformers.sparsemax.LigerSparsemax
transformers.sparsemax.LigerSparsemaxFunction
transformers.trainer.orpo_trainer._FSDPForwardRedirection
chunked_loss.LigerFusedLinearCPOLoss
chunked_loss.LigerFusedLinearDPOLoss
chunked_loss.LigerFusedLinearGRPOLoss
chunked_loss.LigerFusedLinearJSDLoss
chunked_loss.LigerFusedLinearKTOLoss
chunked_loss.LigerFusedLinearORPOLoss
chunked_loss.LigerFusedLinearSimPOLoss
chunked_loss.LigerFusedLinearCosineSimilarityLoss
chunked_loss.fused_linear_preference.LigerFusedLinearPreferenceBase
chunked_loss.functional.liger_fused_linear_dpo
transformers.dyt.LigerDyT
transformers.dyt.LigerDyTFunction
transformers.fused_add_rms_norm.LigerFusedAddRMSNorm
transformers.fused_add_rms_norm.LigerFusedAddRMSNormFunction
transformers.group_norm.LigerGroupNorm
transformers.group_norm.LigerGroupNormFunction
transformers.layer_norm.LigerLayerNorm
transformers.layer_norm.LigerLayerNormFunction
transformers.llama4_rope.LigerLlama4RopeFunction
transformers.llama4_rope.apply_liger_llama4_rope_full
transformers.llama4_rope.liger_llama4_text_rotary_pos_emb
transformers.llama4_rope.liger_llama4_vision_rotary_pos_emb
transformers.poly_norm.LigerPolyNorm
transformers.poly_norm.LigerPolyNormFunction
transformers.qwen2vl_mrope.LigerQwen2VLMRopeFunction
transformers.qwen2vl_mrope.liger_multimodal_rotary_pos_emb
transformers.relu_squared.LigerReLUSquared
transformers.relu_squared.LigerReLUSquaredFunction
transformers.functional.liger_dyt
transformers.functional.liger_fused_add_rms_norm
transformers.functional.liger_group_norm
transformers.functional.liger_layer_norm
transformers.functional.liger_poly_norm
transformers.functional.liger_qwen2vl_mrope
transformers.functional.liger_relu_squared
transformers.LigerRMSNormForMuseGlimmer
transformers.LigerRMSNormForMuseGlimmerTextCentered
transformers.rms_norm.LigerRMSNormForMuseGlimmer
transformers.rms_norm.LigerRMSNormForMuseGlimmerTextCentered
transformers.monkey_patch._patch_layer_norm_module
transformers.fuse_residual_norms
transformers.functional.liger_cross_entropy
transformers.functional.liger_fused_linear_cross_entropy
transformers.functional.liger_rms_norm
transformers.functional.liger_rope
transformers.functional.liger_swiglu
transformers.functional.liger_geglu
transformers.functional.CrossEntropyOutput
transformers.functional.LigerRMSNormFunction
transformers.monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
transformers.monkey_patch.MIN_SUPPORTED_TRANSFORMERS_VERSION
transformers.monkey_patch.IS_TRANSFORMERS_V5_OR_LATER
transformers.monkey_patch.PEFT_AVAILABLE
transformers.monkey_patch.logger
transformers.monkey_patch._apply_liger_kernel
transformers.monkey_patch._apply_liger_kernel_to_instance
transformers.monkey_patch._bind_method_to_module
transformers.monkey_patch._patch_rms_norm_module
transformers.monkey_patch._patch_swiglu_module
transformers.monkey_patch._patch_geglu_module
transformers.monkey_patch.apply_liger_kernel_to_mistral
transformers.trainer_integration._apply_liger_kernel
transformers.auto_model.AutoLigerKernelForCausalLM
transformers.fsdp._FSDPForwardRedirection
transformers.rms_norm.LigerRMSNorm
transformers.rms_norm.LigerRMSNormForGemma
transformers.rms_norm.LigerRMSNormForGemma2
transformers.rms_norm.LigerRMSNormForGemma3
transformers.rms_norm.LigerRMSNormForGemma4
transformers.rms_norm.LigerRMSNormForOlmo2
transformers.rms_norm.LigerRMSNormForGlm4
transformers.rms_norm.LigerRMSNormForQwen3Next
transformers.rope.liger_rotary_pos_emb
transformers.rope.liger_rotary_pos_emb_vision
transformers.swiglu.LigerSwiGLUMLP
transformers.geglu.LigerGEGLUMLP
transformers.model.llama.lce_forward
transformers.model.llama.lce_maybe_trainable_lm_head
transformers.model.mistral.lce_forward
transformers.model.qwen2.lce_forward
transformers.model.loss_utils.LigerForCausalLMLoss
transformers.model.loss_utils.fixed_fused_linear_cross_entropy
transformers.model.loss_utils.unpack_cross_entropy_result
transformers.model.output_classes.LigerCausalLMOutputWithPast
transformers.model.output_classes.LigerMoeCausalLMOutputWithPast
utils.PEFT_AVAILABLE
utils.is_peft_available
utils.infer_device
utils.infer_comm_backend
utils.infer_device_arch
utils.is_npu_available
utils.transformers_version_dispatch
utils.get_total_gpu_memory
ops.utils.is_hip
ops.utils.device_context
ops.utils.ensure_contiguous
ops.utils.calculate_settings
ops.utils.compare_version
ops.utils.get_amp_custom_fwd_bwd
ops.utils.amp_custom_fwd
ops.utils.amp_custom_bwd
ops.utils.torch_to_triton_dtype
ops.utils.get_npu_core_count
ops.utils.set_large_grf_mode
ops.LigerVocabParallelCEFunction
ops.vocab_parallel_cross_entropy.LigerVocabParallelCEFunction
ops.vocab_parallel_cross_entropy.validate_formula_and_mode
ops.backends.IMPL_REGISTRY
ops.backends.register_impl
ops.backends.registry.IMPL_REGISTRY
ops.backends.registry.LIGER_KERNEL_IMPL_ENV
ops.backends.registry.ImplInfo
ops.backends.registry.register_impl
ops.backends.registry.select_impl
ops.configure.configure
ops.configure.FusedLinearCrossEntropyConfig
ops.configure.MoEConfig
ops.cute.is_available
transformers.LigerVocabParallelCrossEntropy
transformers.vocab_parallel_cross_entropy.LigerVocabParallelCrossEntropy
megatron.LigerMegatronCrossEntropy
megatron.LigerMegatronRMSNorm
megatron.LigerMegatronSwiGLU
megatron.apply_liger_kernel_to_megatron
triton.apply_liger_triton_cache_manager
backends.Capability
backends.OpImpl
backends.all_impls
backends.available_impls
backends.clear_available_cache
backends.dispatch
backends.get_impl
backends.register_impl
backends.resolve_impl
backends.set_impl
backends.ImplNotAvailableError
backends.NoImplAvailableError
backends.LigerImplFallbackWarning
backends.registry.declare_op_locations
backends.registry.get_discovery_failures
functional.rms_norm
functional.cross_entropy
functional.fused_linear_cross_entropy
testing.assert_op_correctness
testing.pytorch_reference_layer_norm
testing.pytorch_reference_rms_norm
testing.requires_cuda
testing.sum_based_dw_close
""".split()


@pytest.mark.parametrize("path", PATHS)
def test_path(path):
    module, name = f"liger_kernel.{path}".rsplit(".", 1)
    value = getattr(importlib.import_module(module), name)
    if inspect.isfunction(value) or inspect.isclass(value):
        assert inspect.getdoc(value), f"{path} has no docstring"


SUBCLASSES = {
    "ForGemma": ("hidden_size", 1.0, "gemma", "zeros", True, "row_mode"),
    "ForGemma2": ("hidden_size", 1.0, "gemma", "zeros", False, "row_mode"),
    "ForGemma3": ("dim", 1.0, "gemma", "zeros", False, None),
    "ForGemma4": ("dim", 0.0, "gemma", "ones", False, "with_scale"),
    "ForMuseGlimmer": ("dim", 0.0, "gemma", "ones", False, "with_scale"),
    "ForMuseGlimmerTextCentered": ("hidden_size", 1.0, "gemma", "zeros", False, "row_mode"),
    "ForOlmo2": ("hidden_size", 0.0, "llama", "ones", False, "row_mode"),
    "ForGlm4": ("hidden_size", 0.0, "llama", "ones", False, "row_mode"),
    "ForQwen3Next": ("hidden_size", 1.0, "gemma", "zeros", False, "row_mode"),
}


@pytest.mark.parametrize("suffix", SUBCLASSES)
def test_rms_norm_subclasses(suffix):
    """Constructor order and defaults, and the arithmetic of the class each stands for."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.glm4.modeling_glm4 import Glm4RMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    from liger_kernel.transformers import rms_norm

    first, offset, casting, init, in_place, last = SUBCLASSES[suffix]
    cls = getattr(rms_norm, f"LigerRMSNorm{suffix}")
    parameters = inspect.signature(cls).parameters
    names = [first, "eps", "offset", "casting_mode", "init_fn", "in_place", *([last] if last else [])]
    assert list(parameters) == names
    assert [parameters[n].default for n in names[1:6]] == [1e-6, offset, casting, init, in_place]
    theirs = {"ForOlmo2": Olmo2RMSNorm, "ForGlm4": Glm4RMSNorm}.get(suffix, Gemma2RMSNorm)(48, 1e-6).bfloat16()
    ours = cls(48).bfloat16()
    assert "LigerRMSNorm" in repr(ours)
    noise = 0.1 * torch.randn(48)
    for module in (ours, theirs):
        module.weight.data.add_(noise)
    if suffix in ("ForGemma4", "ForMuseGlimmer"):
        ours.weight.data.copy_(1 + theirs.weight.float())
        theirs.weight.data.copy_(ours.weight.float() - 1)
    x = torch.randn(20, 48).bfloat16()
    difference = (ours(x).float() - theirs(x).float()).abs()
    assert (difference <= 2**-7 * theirs(x).float().abs()).all() and (difference > 0).float().mean() < 0.02


@pytest.mark.parametrize("suffix", ["ForGemma4", "ForMuseGlimmer"])
def test_weightless_norms(suffix):
    from liger_kernel.transformers import rms_norm

    norm = getattr(rms_norm, f"LigerRMSNorm{suffix}")(**({"dim": 32} if suffix == "ForGemma4" else {}), with_scale=False)
    assert norm.weight is None and not list(norm.parameters())
    x = torch.randn(5, 32)
    torch.testing.assert_close(norm(x), x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def test_functional_defaults_follow_torch():
    from liger_kernel.transformers.functional import liger_cross_entropy

    ours = list(inspect.signature(liger_cross_entropy).parameters.values())[:8]
    theirs = list(inspect.signature(torch.nn.functional.cross_entropy).parameters.values())
    assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs]


def test_utils(monkeypatch):
    from liger_kernel import utils

    assert utils.infer_device() == ("cuda" if torch.cuda.is_available() else "cpu")
    assert isinstance(utils.infer_comm_backend(), str)
    monkeypatch.setattr(utils, "infer_device", lambda: "cpu")
    utils.infer_device_arch.cache_clear()
    assert utils.infer_device_arch() == "cpu"
    monkeypatch.setattr(utils, "infer_device", lambda: "cuda")
    names = {(7, 5): "volta_turing", (8, 9): "ampere_ada", (9, 0): "hopper", (10, 3): "blackwell_ultra", (11, 1): "sm_111"}
    for capability, name in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        utils.infer_device_arch.cache_clear()
        assert utils.infer_device_arch() == name
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: 1 / 0)
    utils.infer_device_arch.cache_clear()
    assert utils.infer_device_arch() == "cuda"
    utils.infer_device_arch.cache_clear()
    dispatch = utils.transformers_version_dispatch
    assert dispatch("4.0", min, max, after_args=(1, 2)) == 2 and dispatch("99.0", min, max, before_args=(1, 2)) == 1


def test_ops_utils():
    import operator

    from liger_kernel.ops import utils

    assert [utils.calculate_settings(n) for n in (1, 100, 2048, 8193, 32769)] == [(1, 4), (128, 4), (2048, 8), (16384, 16), (65536, 32)]
    with pytest.raises(RuntimeError, match="65536"):
        utils.calculate_settings(65537)
    assert utils.compare_version("torch", operator.ge, "2.0") and not utils.compare_version("no-such-package", operator.ge, "0")
    seen = utils.ensure_contiguous(lambda ctx, a, b=None: (a.is_contiguous(), b.is_contiguous()))
    assert seen(None, torch.ones(3, 2).T, b=torch.ones(3, 2).T) == (True, True)
    with utils.device_context("cpu"):
        pass
    assert utils.get_npu_core_count() == 20 and isinstance(utils.is_hip(), bool)
