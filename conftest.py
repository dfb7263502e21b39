"""Shared by every test: the same random numbers every time, and a compiled function of one test does not count towards another's
recompilation limit."""

import sys

import pytest


@pytest.fixture(autouse=True)
def repeatable():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
