"""What a training step of a Llama-like model holds, by formula; docs/memory.md derives each. Bytes throughout, plain integers.

The model: L decoder layers of two RMSNorms, grouped-query attention with RoPE through scaled_dot_product_attention, and a gated
MLP; AdamW with states in the weights' dtype; gradients set to None between steps. `e` is the bytes of an element, T = batch seq.
"""

import dataclasses

MODEL_TYPES = ("llama", "qwen2", "mistral")
ELEMENT = {"float32": 4, "bfloat16": 2}
ARMS = ("hf", "patched")
# The chunks of fused_linear_cross_entropy (its plan.h).
LOGITS = {"cuda": (1280 << 20, 640, 4096), "cpu": (64 << 20, 192, 1024)}  # bytes wanted, fewest rows, most rows
WORKSPACE = {"cuda": 2 * (32 << 20), "cpu": 0}  # cuBLAS on Hopper: 32 MiB for each thread that multiplies (forward's, backward's)
WIDEN = 8 << 20  # fp32 copy of a block of the weight, where the CPU does not multiply 16-bit numbers


@dataclasses.dataclass(frozen=True)
class Shape:
    """The numbers of a model that memory depends on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    biases: bool  # of the q, k and v projections

    @classmethod
    def of(cls, entries):
        """From the entries of a transformers config; ValueError for a model that the formulae do not describe."""
        if entries["model_type"] not in MODEL_TYPES:
            raise ValueError(f"no formula for model type {entries['model_type']!r}, only for {', '.join(MODEL_TYPES)}")
        try:
            heads = entries["num_attention_heads"]
            return cls(layers=entries["num_hidden_layers"], hidden=entries["hidden_size"], intermediate=entries["intermediate_size"],
                       heads=heads, kv_heads=entries.get("num_key_value_heads") or heads,
                       head_dim=entries.get("head_dim") or entries["hidden_size"] // heads, vocab=entries["vocab_size"],
                       tied=bool(entries.get("tie_word_embeddings", False)), biases=entries["model_type"] == "qwen2")
        except KeyError as e:
            raise ValueError(f"the model's configuration has no {e.args[0]}") from None

    @property
    def layer_parameters(self):
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv + 3 * self.intermediate + 2) + (q + 2 * kv if self.biases else 0)

    @property
    def parameters(self):
        return self.layers * self.layer_parameters + self.hidden * (self.vocab * (1 if self.tied else 2) + 1)

    @property
    def tensors(self):
        return self.layers * (12 if self.biases else 9) + (2 if self.tied else 3)


def chunk_rows(rows, hidden, vocab, element, device, native=True):
    """(rows of a chunk, chunks) of the fused loss.

    Args:
        rows: labels that are not ignored.
        device: "cuda" or "cpu".
        native: whether the products take operands of `element` bytes as they are; else fp32.
    """
    wanted, fewest, most = LOGITS[device]
    chunk = min(max(wanted // (vocab * (element if native else 4)), fewest), most)
    if element == 2 and native and rows <= chunk + hidden:
        chunk = max(chunk, rows)  # one chunk needs no fp32 sum
    chunks = max(-(-rows // chunk), 1)
    size = -(-rows // chunks)
    if chunks > 1:
        multiple = 128 if device == "cuda" else 8
        size = min(-(-size // multiple) * multiple, rows)
    return max(size, 1), max(-(-rows // max(size, 1)), 1)


def layer_activations(s, arm, e):
    """{what: bytes a token} that one layer saves for backward."""
    q, kv, wide = s.heads * s.head_dim, s.kv_heads * s.head_dim, 4
    norm = wide * s.hidden + e * s.hidden + 4 if arm == "hf" else e * s.hidden + 4
    return {"norms": 2 * norm, "projections' inputs": 2 * e * s.hidden, "attention": e * (2 * q + 2 * kv) + 4 * s.heads,
            "MLP": e * s.intermediate * (4 if arm == "hf" else 3)}


def fused_loss(s, tokens, rows, e, device, native=True):
    """{scratch, dw sum, dw, dx} of the fused loss: bytes while it runs; `dw` is 0 where the sum is the result."""
    c = e if native else 4
    chunk, chunks = chunk_rows(rows, s.hidden, s.vocab, e, device, native)
    weight = s.vocab * s.hidden
    scratch = chunk * (-(-s.vocab // 8) * 8 + 2 * s.hidden) * c + (0 if native else WIDEN)
    rounded = e == 2 and (chunks > 1 or not native)
    return {"scratch": scratch, "dw sum": weight * (4 if rounded else e), "dw": weight * e if rounded else 0, "dx": tokens * s.hidden * e}


def predict(s, arm, batch, seq, dtype, checkpointing, device, native=True):
    """What a step holds.

    Args:
        s: Shape.
        arm: "hf" or "patched".
        dtype: "float32" or "bfloat16", of weights, gradients and optimizer states.
        device: "cuda" or "cpu": the chunks of the fused loss.

    Returns:
        {"weights", "gradients", "optimizer", "kept" (activations at the end of forward), "layer" (one layer's backward), "loss"
        (logits and their copies, or the fused loss's scratch and gradients), "phases": {phase: peak}, "peak", "peak_above_model"}.
    """
    e, tokens = ELEMENT[dtype], batch * seq
    weights, row = s.parameters * e, tokens * s.hidden * e
    states = 2 * weights + 4 * s.tensors
    standing = weights + states + WORKSPACE[device]
    head = s.vocab * s.hidden * e
    one = tokens * sum(layer_activations(s, arm, e).values())
    shared = 0 if arm == "hf" and e == 2 else row  # the layer's input, which its first norm saves, is what checkpointing keeps
    kept_layer = row if checkpointing else one
    tables = 2 * seq * s.head_dim * e + 8 * tokens  # cos and sin; token ids
    tail = tokens * (((4 + e) if arm == "hf" else e) * s.hidden + 4) + row  # what the last norm saves, and the last hidden state
    kept = s.layers * kept_layer + tables
    if arm == "hf":  # logits.float(), log_softmax; their two gradients
        logits = tokens * s.vocab
        loss = {"log_softmax": 4 * logits, "gradient of nll_loss": 4 * logits, "gradient of log_softmax": 4 * logits}
        loss_forward, loss_backward = logits * (10 if e == 2 else 8), sum(loss.values())
    else:
        loss = fused_loss(s, tokens, batch * (seq - 1), e, device, native)
        loss_forward, loss_backward = loss["dx"] + loss["dw sum"] + max(loss["scratch"], loss["dw"]), loss["dx"] + head
    # A layer's backward is at its peak in the MLP's activation: the layer's activations (made again under checkpointing), three
    # gradients of [T, I] less the product that has been released, the residual stream's gradient, and down_proj's own.
    work = (one - shared if checkpointing else 0) + 2 * tokens * s.intermediate * e + row + s.hidden * s.intermediate * e
    backward = [standing + kept + tail + loss_backward]
    for done in (0, s.layers - 1):
        backward.append(standing + head + done * s.layer_parameters * e + (s.layers - done) * kept_layer + tables + work)
    # The embedding's gradient comes last. When it is the head's weight the two are added, into a third piece of memory where the
    # head's is a transposed product.
    backward.append(standing + weights + row + (head * (2 if arm == "hf" else 1) if s.tied else 0))
    # Under checkpointing a layer's forward holds gate, up and their product, and the residual stream before and after its norm.
    forward = 3 * tokens * s.intermediate * e + 2 * row if checkpointing else one
    phases = {"forward": standing + max(kept + tail, (s.layers - 1) * kept_layer + tables + row + forward),
              "loss": standing + kept + tail + loss_forward, "backward": max(backward), "optimizer": standing + weights}
    peak = max(phases.values())
    return {"weights": weights, "gradients": weights, "optimizer": states, "kept": kept + tail, "layer": work,
            "loss": loss, "phases": phases, "peak": peak, "peak_above_model": max(0, peak - 2 * weights - states)}


def largest(fits, guess=1, resolution=0.0, most=1 << 24):
    """The largest n of 1 to `most` with fits(n): steps from `guess` that double until the answer is enclosed, then bisection; 0 when
    1 does not fit. A good guess takes two calls.

    Args:
        resolution: the answer may be smaller than the largest by this share.
    """
    n = min(max(1, guess), most)
    step = max(1, int(n * resolution))
    low, high = 0, most + 1
    while low == 0 or high > most:
        if fits(n):
            low, n = n, min(n + step, most)
            if low == most:
                return low
        else:
            high, n = n, max(n - step, 1)
            if high == 1:
                return 0
        step *= 2
    while high - low > max(1, low * resolution):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
