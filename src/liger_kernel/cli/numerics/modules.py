"""The modules that a patch replaces, beside those of transformers: bf16 in, fp32 accumulation, bf16 out.

A small Llama's norm, MLP, rotation and loss head run with the same inputs and the same upstream gradient in both models. An element
passes when the two differ by at most 1e-3 of the tensor's largest element, or when ours is within one bf16 rounding (one unit in the
last place) of the value in fp64; every element of an output must. Both models' gradients have passed through several bf16 tensors by the
time they reach a module's end, which no single rounding describes: a gradient also passes as a whole when its largest error against fp64
is no worse than twice that of transformers, the rule of every op. The attention's projections are left alone, so their results must be
the same bits.
"""

import copy

import torch

from liger_kernel.cli.numerics.measure import ulps_of

SCALE_TOLERANCE = 1e-3
SIZES = dict(hidden_size=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000, num_hidden_layers=2)
TOKENS = 64
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def compared(module, what, ours, theirs, truth, gradient=False, exact=False):
    """One row from two results and the fp64 truth of one tensor; differences and errors are relative to its largest element."""
    dtype = ours.dtype
    ours, theirs, truth = (t.detach().double() for t in (ours, theirs, truth))
    scale = float(theirs.abs().max())
    apart = (ours - theirs).abs()
    own, other = (ulps_of((t - truth).abs(), truth, dtype) for t in (ours, theirs))
    fine = ours == theirs if exact else (apart <= SCALE_TOLERANCE * scale) | (own <= 1)
    outside = int((~fine).sum())
    error, their_error, relative = (float(t.max()) / max(scale, 1e-30) for t in ((ours - truth).abs(), (theirs - truth).abs(), apart))
    passes = not outside or (gradient and not exact and error <= 2 * their_error)
    return {"module": module, "what": what, "gradient": gradient, "exact": exact, "elements": ours.numel(), "scale": scale,
            "difference": relative, "same_bits": float((apart == 0).double().mean()), "error": error, "error_of_transformers": their_error,
            "ulps": float(own.max()), "ulps_of_transformers": float(other.max()), "outside": outside, "passes": passes,
            "result_dtype": str(dtype).removeprefix("torch.")}


def run(function, inputs, upstream, parameters=()):
    """(outputs, gradients of inputs and parameters); the upstream gradient is drawn once and cast."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    parameters = list(parameters)
    grads = torch.autograd.grad(outputs, [*leaves, *parameters], [u.to(o.dtype) for u, o in zip(upstream, outputs, strict=True)])
    return outputs, grads


def rows_of(module, names, three, exact=False):
    """Rows of every output and gradient of (ours, theirs, truth), each as :func:`run` returns it."""
    flat, outputs = [(*outputs, *grads) for outputs, grads in three], len(three[0][0])
    return [compared(module, what, *tensors, gradient=i >= outputs, exact=exact)
            for i, (what, *tensors) in enumerate(zip(names, *flat, strict=True))]


class Fixed(torch.nn.Module):
    """In the place of a model's decoder: gives the hidden states it was told to."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def forward(self, *args, **kwargs):
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


def with_hidden(model, labels):
    """hidden states -> loss, by the model's own forward."""
    def loss(hidden):
        body, model.model = model.model, Fixed(hidden)
        try:
            return model(input_ids=torch.zeros_like(labels), labels=labels).loss
        finally:
            model.model = body

    return loss


def gate(device):
    """The rows of every module on a device."""
    from transformers.models.llama import modeling_llama

    from liger_kernel.patch import patch_model, tiny, unpatch

    plain = tiny.causal_lm("llama", **SIZES).to(device).to(torch.bfloat16).train()
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    hidden = plain.config.hidden_size
    x, up = normal(2, TOKENS, hidden), normal(2, TOKENS, hidden)
    heads = [normal(2, n, TOKENS, hidden // 4) for n in (4, 2)]
    head_ups = [normal(*t.shape) for t in heads]
    labels = torch.randint(plain.config.vocab_size, (2, TOKENS), generator=generator).to(device)
    labels[0, :7] = -100
    cos, sin = plain.model.rotary_emb(x, torch.arange(TOKENS, device=device)[None])
    one = [torch.ones((), device=device)]
    layer = "model.layers.0."

    def sub(model, name):
        return model.get_submodule(layer + name)

    def rotate(q, k, cos=cos, sin=sin):
        return modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)

    def norm64(x, weight):
        from liger_kernel.ops.rms_norm.ref import reference

        return reference(x, weight, plain.config.rms_norm_eps)

    def results(model, of):
        """{module: run} of a bf16 model."""
        norm, mlp = of("input_layernorm"), of("mlp")
        found = {"norm": run(norm, [x], [up], [norm.weight]),
                 "mlp": run(mlp, [x], [up], mlp.parameters()),
                 "rotation": run(rotate, heads, head_ups),
                 "loss head": run(with_hidden(model, labels), [x], one, [model.lm_head.weight])}
        for name in PROJECTIONS:
            projection = of("self_attn." + name)
            found[name] = run(projection, [x], [up[..., : projection.out_features]], projection.parameters())
        return found

    theirs = results(plain, lambda name: sub(plain, name))
    wide = copy.deepcopy(plain).double()
    norm, mlp, head = sub(wide, "input_layernorm"), sub(wide, "mlp"), wide.lm_head.weight
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]

    def loss64(x):
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, head).flatten(0, 1), shifted.flatten())

    x64, up64 = [x.double()], [up.double()]
    truth = {"norm": run(lambda x: norm64(x, norm.weight), x64, up64, [norm.weight]),
             "mlp": run(mlp, x64, up64, mlp.parameters()),
             "rotation": run(lambda q, k: rotate(q, k, cos.double(), sin.double()), [t.double() for t in heads],
                             [t.double() for t in head_ups]),
             "loss head": run(loss64, x64, one, [head])}
    patched = copy.deepcopy(plain)
    try:
        patch_model(patched)
        ours = results(patched, lambda name: sub(patched, name))
    finally:
        unpatch()
    weights = [f"d{name.removesuffix('_proj.weight')}" for name, _ in mlp.named_parameters()]
    names = {"norm": ("y", "dx", "dw"), "mlp": ("y", "dx", *weights), "rotation": ("q", "k", "dq", "dk"), "loss head": ("loss", "dx", "dw")}
    found = []
    for module, each in names.items():
        found += rows_of(module, each, (ours[module], theirs[module], truth[module]))
    for module in PROJECTIONS:
        found += rows_of(module, ("y", "dx", "dw"), (ours[module], theirs[module], theirs[module]), exact=True)
    return found
