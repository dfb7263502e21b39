"""The accuracy rule itself refuses what it should."""

import pytest
import torch

from liger_kernel.core.accuracy import assert_accurate

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(("actual", "truth", "words"), [
    ([1.0, NAN], [1.0, 2.0], "NaN at 1 elements"),
    ([1.0, INF], [1.0, -INF], "infinities differ at 1"),
    ([1.0, INF], [1.0, 2.0], "infinities differ at 1"),
    ([NAN, INF, 1.0], [NAN, 2.0, 1.0], "infinities differ at 1"),  # a NaN elsewhere excuses nothing
    ([NAN, 1.0], [NAN, INF], "infinities differ at 1"),
    ([NAN, 1.0], [NAN, 1.5], "element 1"),
    ([1.0, 1.0], [1.0, 1.001], "element 1"),
])
def test_refused(actual, truth, words):
    with pytest.raises(AssertionError, match=words):
        assert_accurate(torch.tensor(actual), torch.tensor(truth, dtype=torch.float64), 1e-6)


def test_accepted():
    values = torch.tensor([1.0, NAN, INF, -INF])
    assert_accurate(values, values.double(), 0.0, values)
    assert_accurate(torch.tensor([INF]).half(), torch.tensor([1e6], dtype=torch.float64), 0.0)  # beyond fp16's largest number
