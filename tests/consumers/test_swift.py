"""ms-swift: the wrapper that it puts around our loss, and what its trainers ask for. Runs in the ms-swift environment.

Its legacy `apply_liger` names model types that this version of it no longer has; what that imports is in test_contracts.py."""

import importlib.util

import pytest

if importlib.util.find_spec("swift") is None:
    pytest.skip("needs ms-swift: see test_environments.py", allow_module_level=True)

from swift.utils import is_liger_available

from liger_kernel.patch import compare, tiny, unpatch


def test_found():
    assert is_liger_available()


def test_wrapper_around_the_loss():
    """It takes effect in forwards that were imported before, and drops what only attention takes."""
    from swift.trainers.arguments import TrainArgumentsMixin

    import liger_kernel.transformers as liger
    from liger_kernel.transformers.model import loss_utils

    expected = compare.run(tiny.causal_lm("llama"), **compare.inputs())
    model = tiny.causal_lm("llama")
    liger._apply_liger_kernel_to_instance(model=model)
    original = loss_utils.LigerForCausalLMLoss
    try:
        TrainArgumentsMixin._patch_liger_kernel()
        assert loss_utils.LigerForCausalLMLoss is not original
        distance = compare.distance(compare.run(model, **compare.inputs()), expected)
        assert max(distance.logits, distance.loss, distance.gradients) < 1e-5, distance
    finally:
        loss_utils.LigerForCausalLMLoss = original
        unpatch(model)
