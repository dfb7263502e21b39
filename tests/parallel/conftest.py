"""Ranks for the tests of this folder: see ranks.py. Helpers beside this file are imported by their own names."""

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parent))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """`ranks(function, *arguments)` calls a function of a test module on every rank at once."""
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    from ranks import Ranks

    group = Ranks(tmp_path_factory.mktemp("ranks"))
    yield group
    group.stop()


@pytest.fixture(autouse=True)
def _undo():
    yield
    if "liger_kernel.patch" in sys.modules:
        sys.modules["liger_kernel.patch"].unpatch()
