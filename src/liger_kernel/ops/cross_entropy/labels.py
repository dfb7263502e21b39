"""Counts over the labels of a call: how many are not ignored, and whether any is out of range.

The counts are made on the device, where the kernels read them. The host needs them only for the range check, so ask early
(before the main kernel is launched) and call `count()` late: by then the copy of 24 bytes has usually arrived."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.fakes import register_fake
from liger_kernel.core.tensors import has_values


@register_fake("liger_kernel::cross_entropy_label_stats")
def _(target, class_weight, vocab, ignore_index):
    return target.new_empty((6,), dtype=torch.int32)


NO_LABEL = -(1 << 62)  # an ignore_index for those who have a mask: no label has it by chance


class LabelStats:
    """What :func:`ask` returns.

    Attributes:
        device: int32 tensor of 6 elements beside the labels: the kernels' LabelStats struct (cross_entropy.h).
    """

    def __init__(self, device, target, vocab, ignore_index):
        self.device = device
        self._target, self._vocab, self._ignore_index = target, vocab, ignore_index
        self._host = self._event = None
        if torch.compiler.is_compiling() or not has_values(device) or (device.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if device.is_cuda:
            self._host = torch.empty(6, dtype=torch.int32, pin_memory=True)
            self._host.copy_(device, non_blocking=True)
            self._event = torch.cuda.current_stream(device.device).record_event()
        else:
            self._host = device

    def wait(self):
        """(labels not ignored, labels below 0, labels not below the vocabulary size) as integers; waits for the device.
        None while a graph is being compiled or captured, and for meta and fake tensors, where the host cannot know."""
        if self._host is None:
            return None
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return tuple(self._host[2:5].tolist())

    def count(self):
        """Labels that are not ignored, or None as of :meth:`wait`.

        Raises:
            AssertionError: a label is neither `ignore_index` nor in [0, vocab).
        """
        counts = self.wait()
        if counts is None:
            return None
        count, below, above = counts
        if below or above:
            self._fail(below, above)
        return count

    def _fail(self, below, above):
        valid = self._target[self._target != self._ignore_index]
        if above:
            raise AssertionError(
                f"Target {int(valid.max())} is out of bounds. Expected < {self._vocab} ({above} of {valid.numel()} labels)")
        raise AssertionError(
            f"Target {int(valid.min())} is out of bounds. Expected >= 0 and < {self._vocab} ({below} of {valid.numel()} labels)")


def indices(op, target):
    """`target` as int64. RuntimeError, as of torch's own loss, unless it holds integers."""
    if target.dtype == torch.bool or target.is_floating_point() or target.is_complex():
        raise RuntimeError(f"{op}: target has dtype {target.dtype}, expected class indices in int64")
    return target.to(torch.int64)


def ask(target, vocab, ignore_index=-100, class_weight=None):
    """Counts the labels on their device, in one launch, without waiting.

    Args:
        target: [rows] int64.
        vocab: number of classes.
        ignore_index: the label that is left out.
        class_weight: [vocab] contiguous fp32 or None; its sums are made in the same launch.
    """
    return LabelStats(_ops.cross_entropy_label_stats(target, class_weight, vocab, ignore_index), target, vocab, ignore_index)
