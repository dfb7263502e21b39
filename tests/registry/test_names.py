"""Names that only prepare or report: configure, the Triton and CuTe packages, liger_kernel.testing, output classes."""

import os
import pickle

import pytest
import torch

import liger_kernel.functional as F
import liger_kernel.transformers as liger
from liger_kernel import backends, testing


def test_configure():
    from liger_kernel.ops.configure import FusedLinearCrossEntropyConfig, MoEConfig, configure

    loss, moe = FusedLinearCrossEntropyConfig(8, 16, 32), MoEConfig(8, 16, 4, 2, 1, 8)
    assert (loss.group, loss.tiles_per_reduce, moe.group, moe.max_inflight) == (None, 1, None, 1)
    with pytest.raises(AttributeError):
        loss.group = "tp"
    with pytest.warns(UserWarning, match="torch.distributed"):
        assert configure(process_groups={}, flsce=loss, moe=moe) is False


def test_cute_and_triton():
    from liger_kernel.ops.cute import is_available
    from liger_kernel.triton import apply_liger_triton_cache_manager, monkey_patch

    assert is_available() is False
    before = os.environ.get("TRITON_CACHE_MANAGER")
    assert apply_liger_triton_cache_manager() is None and os.environ.get("TRITON_CACHE_MANAGER") == before
    try:
        from triton.runtime.cache import FileCacheManager
    except ImportError:
        with pytest.raises(AttributeError, match="needs Triton"):
            monkey_patch.LigerTritonFileCacheManager  # noqa: B018
    else:
        assert issubclass(monkey_patch.LigerTritonFileCacheManager, FileCacheManager)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        monkey_patch.nothing  # noqa: B018


@pytest.mark.parametrize("shape", testing.iter_test_shapes([(4, 64), (2, 3, 100)]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_assert_op_correctness(dtype, shape):
    for casting_mode, offset in (("llama", 0.0), ("gemma", 1.0), ("none", 0.0)):
        testing.assert_op_correctness("rms_norm", "cpu", shape, dtype, casting_mode=casting_mode, offset=offset, device="cpu")
    testing.assert_op_correctness("layer_norm", "triton", shape, dtype, device="cpu", extra={"mode": "default"}, strict_grad=True)


def test_assert_op_correctness_fails():
    with pytest.raises(KeyError, match="softmax"):
        testing.assert_op_correctness("softmax", "cpu", (2, 8), torch.float32, device="cpu")
    with pytest.raises(backends.ImplNotAvailableError):
        testing.assert_op_correctness("rms_norm", "eager", (2, 8), torch.float32, device="cpu")

    @backends.register_impl("rms_norm", impl_name="wrong")
    def wrong(x, w, *_, mode=None):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], w) * 1.01

    with pytest.raises(AssertionError, match="rms_norm, wrong"):
        testing.assert_op_correctness("rms_norm", "wrong", (4, 64), torch.float32, device="cpu")
    backends.register_impl("rms_norm", impl_name="wrong", tolerances={torch.float32: (0.1, 0.1)})(wrong)
    testing.assert_op_correctness("rms_norm", "wrong", (4, 64), torch.float32, device="cpu")
    assert testing.requires_cuda().name == "skipif"
    close, text = testing.sum_based_dw_close(torch.ones(3), torch.ones(3) * 1.5, 0.1)
    assert not close and "0.5" in text


def test_output_classes():
    """By name, where the installed transformers has the base; pickle finds them so too."""
    from transformers.modeling_outputs import ModelOutput

    from liger_kernel.transformers.model import output_classes

    cls = output_classes.LigerGemma3CausalLMOutputWithPast
    assert issubclass(cls, ModelOutput) and cls is output_classes.LigerGemma3CausalLMOutputWithPast
    output = pickle.loads(pickle.dumps(cls(predicted_tokens=torch.ones(2))))
    assert type(output) is cls and output.token_accuracy is None and (output.predicted_tokens == 1).all()
    for name in ("LigerNothingCausalLMOutputWithPast", "LigerNothing", "Nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(output_classes, name)


def test_what_others_get_wrong():
    """A capability that cannot be judged is one that is not there; the op goes on with ours."""
    def theirs(*args):
        raise AssertionError("must not be called")

    def predicate():
        raise OSError("no driver")

    for name, capability in (("apart", backends.Capability(modules=["no_such_package.part"])),
                             ("broken", backends.Capability(predicate=predicate))):
        backends.register_impl("rms_norm", impl_name=name, preference_rank=0, capability=capability)(theirs)
    assert {"apart", "broken"}.isdisjoint(backends.available_impls("rms_norm", "cpu"))
    assert F.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6).shape == (2, 4)
    with pytest.raises(TypeError, match="set_impl: got 3"):
        backends.set_impl(3)


def test_other_cross_entropy_must_return_four():
    backends.register_impl("cross_entropy", impl_name="acme", preference_rank=90)(lambda *args: args[0].sum())
    backends.set_impl("acme")
    with pytest.raises(TypeError, match="cross_entropy: the chosen implementation returned Tensor"):
        liger.LigerCrossEntropyLoss()(torch.ones(2, 4), torch.tensor([0, 1]))
