"""What a training step's time is spent on: the model's parts of demo/parts.py, with matrix products and copies set apart.

Without ranges (a compiled model has none) an operator is sorted by its name: Inductor's fused kernels are named after what they
fuse, and a product is the head's when one of its extents is the vocabulary. That is a reading of names, and a kernel that fuses
two parts counts for one of them.
"""

import re

PARTS = ("attention", "norms", "RoPE", "MLP activation", "GEMMs", "head + loss", "optimizer", "copies", "other")

GEMM = re.compile(r"::_?(mm|addmm|grouped_mm|scaled_mm|int_mm|linear|mkldnn_linear|linear_pointwise)(\b|$)|(Mm|Addmm)Backward0$")
BATCHED = re.compile(r"::(bmm|baddbmm)(\b|$)")
ATTENTION = re.compile(r"attention|flash_fwd|flash_bwd|fmha")
COPY = re.compile(r"^aten::(copy_|clone|contiguous|_to_copy|to|cat|fill_|zero_|zeros|zeros_like)$|^Memcpy|^Memset|cudaMemcpy|cudaMemset")
FUSED = re.compile(r"triton_.*fused|cpp_fused")  # Inductor: triton_red_fused_..., cpp_fused_...
# The first that matches: a kernel that adds a residual and normalises counts as a norm.
WORDS = (("head + loss", re.compile(r"log_softmax|nll_loss|logsumexp|cross_entropy")),
         ("norms", re.compile(r"rsqrt|native_layer_norm|_mean_|_pow_")),
         ("MLP activation", re.compile(r"silu|sigmoid|gelu|relu")),
         ("other", re.compile(r"embedding|index_put")),
         ("RoPE", re.compile(r"_cos|_sin|_neg|_cat|slice_backward")),
         ("copies", re.compile(r"fused_(_?(to_copy|clone|copy|view|transpose|t|unsafe_view|slice|expand)_?)+(\d+_?)*$")))
OPTIMIZER = re.compile(r"multi_tensor_apply|FusedAdam")  # the kernels of the step's fused AdamW
RANGES = ("part: ", "Optimizer.", "ProfilerStep", "## Call ", "Torch-Compiled Region")
BY_RANGE = {"rope": "RoPE", "MLP": "MLP activation"}  # demo/parts.py's names


def kind(name, shapes, part, compiled, vocab):
    """The entry of PARTS for an operator (its name and its inputs' shapes) that demo/parts.py books on `part`."""
    if part == "optimizer":
        return part
    if compiled:
        return _by_name(name, shapes, vocab)
    if part in ("norms", "rope", "head + loss"):
        return BY_RANGE.get(part, part)
    if GEMM.search(name) or (part == "MLP" and BATCHED.search(name)):
        return "GEMMs"
    if part == "other" and ATTENTION.search(name):
        return "attention"
    return "copies" if COPY.search(name) else BY_RANGE.get(part, part)


def _by_name(name, shapes, vocab):
    if GEMM.search(name):
        return "head + loss" if any(vocab in shape for shape in shapes if isinstance(shape, (list, tuple))) else "GEMMs"
    if FUSED.search(name):
        return next((part for part, words in WORDS if words.search(name)), "other")
    if ATTENTION.search(name) or BATCHED.search(name):
        return "attention"
    return "copies" if COPY.search(name) else "other"


def table(events, cuda, compiled, vocab):
    """({part: microseconds}, kernels run, copies and fills by the driver) of one step's events; the counts are None on the CPU."""
    from torch.autograd import DeviceType

    from liger_kernel.cli.demo.parts import attributed

    def works(kernel):
        """Whether it is none of the ranges, which the profiler mirrors on the device's timeline."""
        return not getattr(kernel, "is_user_annotation", False) and not kernel.name.startswith(RANGES)

    total = dict.fromkeys(PARTS, 0.0)
    for event, part in attributed(events):
        shapes = event.input_shapes or ()
        if not cuda:
            total[kind(event.name, shapes, part, compiled, vocab)] += event.self_cpu_time_total
        # The kernels that the operator itself launched; those of one launch of the optimizer stand with many operators.
        for kernel in filter(works, event.kernels if cuda and part != "optimizer" else ()):
            name = kernel.name if FUSED.search(kernel.name) else event.name
            total[kind(name, shapes, part, compiled, vocab)] += kernel.duration
    if not cuda:
        return total, None, None
    on_device = [e for e in events if e.device_type == DeviceType.CUDA and works(e)]
    total["optimizer"] = sum(e.time_range.elapsed_us() for e in on_device if OPTIMIZER.search(e.name))
    total["other"] += max(0.0, sum(e.time_range.elapsed_us() for e in on_device) - sum(total.values()))  # launched by no operator
    moved = sum(e.name.startswith(("Memcpy", "Memset")) for e in on_device)
    return total, len(on_device) - moved, moved
