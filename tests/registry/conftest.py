"""Every test here begins, and ends, with no implementation chosen and none registered but ours."""

import sys

import pytest

from liger_kernel import backends
from liger_kernel.backends import registry
from liger_kernel.ops.backends.registry import IMPL_REGISTRY

VARIABLES = ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_BACKEND", "LIGER_KERNEL_IMPL_RMS_NORM", "LIGER_KERNEL_BACKEND_RMS_NORM")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    kept, choosing = {op: dict(impls) for op, impls in registry._IMPLS.items()}, registry.choosing
    yield
    backends.set_impl(None)
    registry.choosing = choosing
    for info in IMPL_REGISTRY.values():
        sys.modules.pop(info.module_path, None)
    registry._IMPLS.clear()
    registry._IMPLS.update(kept)
