"""Losses of per-token log-probabilities and entropies, with gradients, whose logits are made once.

A chunk of rows has its logits made, then the caller's function sees their log-probabilities and says how the loss depends on them,
then the gradients are formed from the same logits: three products, where autograd through the op needs a fourth. The price is a
scratch of all logits of a chunk, and the weight's gradient summed over chunks in fp32."""

import torch

from liger_kernel._native import ops as _ops
from liger_kernel.core.tensors import has_values, product_dtype
from liger_kernel.ops.fused_linear_log_probs import _OP, LogProbs, _check_shapes, _Operands, _transform

# As of fused_linear_cross_entropy: on CUDA the sum of dw hides behind the products from about 2048 rows on.
_CUDA_BYTES, _CUDA_ROWS = 1280 << 20, (640, 4096)
_CPU_BYTES, _CPU_ROWS = 64 << 20, (128, 1024)
_UNIT = 64  # rows whose labels are counted together


def _chunk_rows(rows, vocab, x, logits_memory, narrow):
    cuda = x.is_cuda
    smallest, largest = _CUDA_ROWS if cuda else _CPU_ROWS
    row = vocab * (x.element_size() if cuda else 4)
    if logits_memory:
        wanted = max(logits_memory // row, _UNIT)
    else:
        wanted = min(max((_CUDA_BYTES if cuda else _CPU_BYTES) // row, smallest), largest)
        if narrow and rows <= wanted + x.shape[1]:  # all logits take no more than a chunk of them and dw's copy in fp32
            wanted = rows
    chunks = -(-rows // max(wanted, 1))
    return -(-rows // max(chunks, 1))


class _UnitCounts:
    """How many rows of each `unit` of them are not ignored. Asked before the labels' own count, whose answer the host waits for, and
    copied to the host without waiting: read after it, they are there."""

    def __init__(self, target, unit, ignore_index):
        self.sizes = [min(unit, target.numel() - begin) for begin in range(0, target.numel(), unit)]
        self.host = self.event = None
        if torch.compiler.is_compiling() or not has_values(target) or (target.is_cuda and torch.cuda.is_current_stream_capturing()):
            return  # then all rows are worked on
        keep = torch.nn.functional.pad(target != ignore_index, (0, len(self.sizes) * unit - target.numel()))
        counts = keep.view(len(self.sizes), unit).sum(1, dtype=torch.int32)
        if target.is_cuda:
            self.host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True).copy_(counts, non_blocking=True)
            self.event = torch.cuda.current_stream(target.device).record_event()
        else:
            self.host = counts

    def read(self):
        if self.event is not None:
            self.event.synchronize()
        return self.host.tolist()


def _chunks(o, units, unit, logits_memory, narrow):
    """[(begin, end, kept)]: ranges of rows, whole units of them, and how many of each are worked on."""
    rows = o.target.numel()
    counts = units.sizes if o.kept is None else units.read()
    limit = _chunk_rows(sum(counts), o.weight.shape[0], o.x, logits_memory, narrow)
    limit = -(-limit // unit) * unit
    chunks, begin, kept = [], 0, 0
    for i, count in enumerate(counts):
        if kept and kept + count > limit:
            chunks.append((begin, i * unit, kept))
            begin, kept = i * unit, 0
        kept += count
    return [*chunks, (begin, rows, kept)] if rows else []


class ChunkLoss:
    """Coefficients by autograd, for :func:`log_probs_and_gradients`, of a loss that is a sum over chunks.

    Args:
        function: (begin, end, :class:`LogProbs`) -> scalar: the part of the loss that rows [begin, end) contribute.

    Attributes:
        loss: the sum, detached; None before the first chunk.
    """

    def __init__(self, function):
        self.function, self.loss = function, None

    def __call__(self, begin, end, chunk):
        names = [n for n in ("logp", "entropy", "lse") if getattr(chunk, n) is not None]
        with torch.enable_grad():
            leaves = [getattr(chunk, n).detach().requires_grad_() for n in names]
            part = self.function(begin, end, LogProbs(**dict(zip(names, leaves, strict=True)), predicted_tokens=chunk.predicted_tokens))
            grads = torch.autograd.grad(part, leaves, allow_unused=True) if part.requires_grad else [None] * len(leaves)
        part = part.detach()
        self.loss = part if self.loss is None else self.loss + part
        found = dict(zip(names, grads, strict=True))
        return found.get("logp"), found.get("entropy"), found.get("lse")


def log_probs_and_gradients(x, weight, target, coefficients, bias=None, *, group=1, temperature=1.0, logit_scale=1.0, softcap=None,
                            ignore_index=-100, want_entropy=False, want_lse=False, want_prediction=False, want_dx=None, want_dw=None,
                            want_db=None, label_stats=None, logits_memory=0):
    """The results of :func:`fused_linear_log_probs` and the gradients of a loss of them, without autograd, logits made once.

    Args:
        x, weight, target, bias, temperature, logit_scale, softcap, ignore_index, label_stats: as of
            :func:`fused_linear_log_probs`, except that results have one dimension: rows are x's leading dimensions flattened.
        coefficients: called once a chunk, in order, with (begin, end, :class:`LogProbs` of rows [begin, end)); returns d(loss)/d(logp),
            or a tuple of the derivatives by logp, entropy and lse, each (end - begin,) or None for zeros. Those of ignored rows are
            not looked at. :class:`ChunkLoss` makes them from a loss by autograd.
        group: chunks are whole groups of this many rows: the length of the sequences (or of adjacent pairs of them) for losses of
            sums over a sequence. A group is never cut, so that the logits of one are the least memory.
        want_entropy, want_lse, want_prediction: which results are wanted besides logp.
        want_dx, want_dw, want_db: which gradients are wanted; None: as the tensor requires one.
        logits_memory: most bytes of logits held at once, though not below 64 rows or one group; 0 for the default, 1.25 GiB on CUDA and
            64 MiB on the CPU, of 640 to 4096 and 128 to 1024 rows.

    Returns:
        (:class:`LogProbs`, dx, dw, db), gradients of the tensors' dtypes (fp32 for fp16 tensors) and None when not wanted.
        Coefficients of a mean fall below the smallest fp16 number: those of the first chunk say by which power of two all are made
        larger before they are rounded.
        On CUDA the host waits once, for the number of labels that are not ignored; with `label_stats` not for the device.

    Raises:
        ValueError: the number of rows is no multiple of `group`. The others: see :func:`fused_linear_log_probs`.
    """
    _check_shapes(x, weight, target, bias)
    options = _transform(temperature, logit_scale, softcap)
    rows = target.numel()
    if group < 1 or rows % group:
        raise ValueError(f"{_OP}: {rows} rows are not whole groups of {group}")
    dtype = product_dtype(_OP, x, weight)
    want_dx = x.requires_grad if want_dx is None else want_dx
    want_dw = weight.requires_grad if want_dw is None else want_dw
    want_db = bias is not None and (bias.requires_grad if want_db is None else want_db)
    scaled, scale = dtype == torch.float16, None
    with torch.no_grad():
        unit = group if group > 1 else _UNIT
        units = _UnitCounts(target.reshape(-1), unit, ignore_index)
        o = _Operands(x, weight, target, bias, dtype, ignore_index, label_stats)
        # Chunks of dw are added in fp32; a single one is rounded inside its product.
        narrow = weight.dtype == dtype and not scaled
        chunks = _chunks(o, units, unit, logits_memory, narrow and want_dw and dtype != torch.float32)
        worked = [kept for _, _, kept in chunks if kept]
        vocab, hidden = weight.shape
        stride = -(-vocab // 8) * 8
        bytes_each = o.x.element_size() if o.x.is_cuda else 4
        logits = o.x.new_empty(-(-max(worked, default=0) * stride * bytes_each // 4), dtype=torch.float32)
        dx = o.x.new_empty((rows, hidden), dtype=torch.float32 if scaled else x.dtype) if want_dx else None
        dw = o.x.new_empty((vocab, hidden), dtype=dtype if narrow and len(worked) == 1 else torch.float32) if want_dw else None
        db = o.x.new_empty((vocab,), dtype=torch.float32) if want_db else None
        if not worked:
            for t in (dw, db):
                if t is not None:
                    t.zero_()
        parts, add, first = [], False, 0
        for begin, end, kept in chunks:
            index = None if kept == end - begin else o.kept[first : first + kept]
            first += kept
            part, saved = _forward(o, begin, end, index, logits, options, ignore_index, want_entropy, want_lse, want_prediction)
            parts.append(part)
            factors = coefficients(begin, end, part)
            factors = factors if isinstance(factors, (tuple, list)) else (factors,)
            if not (want_dx or want_dw or want_db):
                continue
            if kept == 0:
                if want_dx:
                    dx[begin:end].zero_()
                continue
            upstream = [_upstream(f, begin, index) for f in (*factors, None, None)[:3]]
            if scaled:
                scale = _scale_of(upstream) if scale is None else scale
                upstream = [None if f is None else f * scale for f in upstream]
            x_c, target_c, *statistics = saved
            dx_c = _ops.fused_linear_log_probs_chunk_backward_(
                logits, dw, db, x_c, o.weight, target_c, *statistics, *upstream, ignore_index, *options, want_dx, add)
            add = True
            if want_dx and index is None:
                dx[begin:end].copy_(dx_c)
            elif want_dx:
                dx[begin:end].zero_()
                dx.index_copy_(0, index, dx_c.to(dx.dtype))
        results = _joined(parts) if parts else _no_rows(o, want_entropy, want_lse, want_prediction)
        if scaled:
            dx, dw, db = (g if g is None or scale is None else g.div_(scale) for g in (dx, dw, db))
        dx, dw, db = (g if g is None or (scaled and like.dtype == torch.float16) else g.to(like.dtype)
                      for g, like in ((dx, x), (dw, weight), (db, bias)))
        return results, None if dx is None else dx.view(x.shape), dw, db


def log_probs_and_gradients_in_tiles(x, weight, target, coefficients, bias=None, *, temperature=1.0, logit_scale=1.0, softcap=None,
                                     ignore_index=-100, want_dx=None, want_dw=None, want_db=None, label_stats=None, logits_memory=0):
    """:func:`log_probs_and_gradients` with the logits made twice, a tile of the vocabulary at a time: for losses that must see all rows,
    or more of them than a chunk holds, before a coefficient is known.

    `coefficients` is called once, with (0, rows, results), and returns d(loss)/d(logp). In fp16 the coefficients are brought to the size
    of 1 before the products, and the gradients, in fp32 then, back after them.
    """
    _check_shapes(x, weight, target, bias)
    options = _transform(temperature, logit_scale, softcap)
    dtype = product_dtype(_OP, x, weight)
    want_dx = x.requires_grad if want_dx is None else want_dx
    want_dw = weight.requires_grad if want_dw is None else want_dw
    want_db = bias is not None and (bias.requires_grad if want_db is None else want_db)
    with torch.no_grad():
        o = _Operands(x, weight, target, bias, dtype, ignore_index, label_stats)
        operands = o.pick(o.x), o.weight, o.pick(o.target), o.bias
        logp, largest, log_sum, _, _ = _ops.fused_linear_log_probs_forward(*operands, ignore_index, *options, logits_memory, False, False)
        results = LogProbs(o.place(logp))
        factor = coefficients(0, o.target.numel(), results)
        if not (want_dx or want_dw or want_db):
            return results, None, None, None
        factor = torch.zeros_like(logp) if factor is None else o.pick(factor.detach().reshape(-1).float()).contiguous()
        half = dtype == torch.float16
        if half:
            scale = _scale_of([factor])
            factor = factor * scale
        dx, dw, db = _ops.fused_linear_log_probs_backward(
            *operands, logp, largest, log_sum, None, factor, None, None, ignore_index, *options, logits_memory, want_dx, want_dw, want_db,
            half or dtype == torch.float32 or weight.dtype != dtype)
        if half:
            dx, dw, db = dx / scale, dw / scale, db / scale
        else:
            dx, dw, db = dx.to(x.dtype), dw.to(weight.dtype), db if bias is None else db.to(bias.dtype)
        return results, o.place(dx).view(x.shape) if want_dx else None, dw if want_dw else None, db if want_db else None


def _forward(o, begin, end, index, logits, options, ignore_index, want_entropy, want_lse, want_prediction):
    """A chunk's results in rows [begin, end), and (x, target, logp, largest, log_sum, entropy) of the rows that are worked on."""
    x = o.x[begin:end] if index is None else o.x.index_select(0, index)
    target = o.target[begin:end] if index is None else o.target.index_select(0, index)
    logp, largest, log_sum, entropy, prediction = _ops.fused_linear_log_probs_chunk_forward_(
        logits, x, o.weight, target, o.bias, ignore_index, *options, want_entropy, want_prediction)

    def place(t, fill=0):
        return t if index is None else t.new_full((end - begin,), fill).index_copy_(0, index - begin, t)

    part = LogProbs(place(logp), place(entropy) if want_entropy else None, place(largest + log_sum) if want_lse else None,
                    place(prediction, -1) if want_prediction else None)
    return part, (x, target, logp, largest, log_sum, entropy if want_entropy else None)


def _scale_of(factors):
    """The power of two that brings the largest of them to [1, 2), on the device; 1 where all are 0."""
    largest = [f.abs().amax() for f in factors if f is not None and f.numel()]
    if not largest:
        return torch.ones(())
    largest = torch.stack(largest).amax()
    return torch.where(largest > 0, torch.exp2(-torch.floor(torch.log2(largest.clamp(min=1e-30)))), 1.0)


def _upstream(factor, begin, index):
    if factor is None:
        return None
    factor = factor.detach().reshape(-1).float()
    return (factor if index is None else factor.index_select(0, index - begin)).contiguous()


def _joined(parts):
    fields = {name: [getattr(p, name) for p in parts] for name in ("logp", "entropy", "lse", "predicted_tokens")}
    return LogProbs(**{name: None if chunks[0] is None else torch.cat(chunks) for name, chunks in fields.items()})


def _no_rows(o, want_entropy, want_lse, want_prediction):
    def new(wanted, dtype=torch.float32):
        return o.x.new_empty(0, dtype=dtype) if wanted else None

    return LogProbs(new(True), new(want_entropy), new(want_lse), new(want_prediction, torch.int64))
