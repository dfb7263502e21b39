"""What an op's `bench.py` hands to `liger bench`.

`bench.py` defines `cases(device) -> list[BenchCase]`. The runner times every contender forward and forward+backward,
interleaved, and reports ratios and shares of the measured copy bandwidth."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass
class BenchCase:
    """One shape and dtype of one op.

    Attributes:
        name: shape and options in words, e.g. "16384x4096 bf16".
        make: () -> tuple of inputs; those that train have requires_grad set.
        contenders: name -> function of the inputs, returning one tensor or a tuple. Backward starts from the first output alone
            when it is a scalar (a loss), else from every output that trains. "liger" is ours, called by a public name (so that
            `--against` can time another package's), "eager" the Hugging Face model's code, "torch" PyTorch's own op where there
            is one. The runner adds torch.compile of "eager".
        forward_bytes, backward_bytes: bytes that must move at least.
        flops: floating-point operations of matrix products, forward and backward; 0 where memory bounds the op.
        forward_only: the op has no useful backward of its own to time.
        yardstick: () -> (call, flops, name): the matrix products alone, at the case's own shapes; `call(i)` runs them once. Without
            it, shares are of a square product's rate.
    """

    name: str
    make: Callable
    contenders: dict
    forward_bytes: int
    backward_bytes: int
    flops: int = 0
    forward_only: bool = False
    yardstick: Callable | None = None
