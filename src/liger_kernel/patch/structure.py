"""Models of types that have no row: a row is made by trying what their classes compute. Opt-in.

Nothing is taken from a name. A norm, a gated MLP, experts or a rotation is replaced if, on small random inputs, one of ours gives the same
results and gradients; the head, if its forward is Llama's (or Qwen3-MoE's), word for word but for names.
"""

import ast
import copy
import functools
import importlib
import inspect
import sys
import textwrap

import torch

from liger_kernel.patch import causal_lm, engine, journal
from liger_kernel.patch.experts import EXPERTS
from liger_kernel.patch.families import FUSED_GATE_UP, SCALE_THEN_ROUND, SWIGLU_PARAMETERS, around_one, with_layer_norm
from liger_kernel.patch.models import by_type
from liger_kernel.patch.specs import GatedNorm, Glu, Head, Model, Norm, Replacement

_WIDTH = 8
_NORMS = (Norm(in_place=False), SCALE_THEN_ROUND, around_one("LigerRMSNormForQwen3Next"))
_GATED_NORMS = tuple(GatedNorm(norm_before_gate=first, casting_mode=mode) for first in (True, False) for mode in ("llama", "gemma"))
_MLPS = (Glu(), FUSED_GATE_UP, Glu(Replacement("geglu", "LigerGEGLUMLP"), "gelu_tanh"))
_ROPES = tuple(Replacement("rope", f"liger_rotary_pos_emb{kind}") for kind in ("", "_interleaved", "_interleaved_table"))
_LIKE = (("llama", "LlamaForCausalLM", False), ("qwen3_moe", "Qwen3MoeForCausalLM", True))  # forwards of heads, with a router's loss


def patch_unknown(model, **flags):
    """Patches a model whose type has no row; one that has is patched by it.

    Rotations change for the whole process, as everywhere; the rest is the model's alone. `patch.unpatch(model)` takes it back.

    Args:
        model: a transformers model, PEFT wrappers or not.
        **flags: rope, cross_entropy, fused_linear_cross_entropy, layer_norm, rms_norm, swiglu (gated MLPs of any activation, experts).

    Returns:
        The :class:`Report`: what was found to be the same, and what was left.

    Raises:
        ValueError: the model has no class of a modelling module of transformers.
        TypeError, AssertionError: as for `patch_model`.
    """
    if getattr(model.config, "model_type", None) in by_type():
        return engine.patch_model(model, **flags)
    row = row_of(model)
    report = engine.patch_model_by(row, model, **flags)
    on = engine.flags_of(row, flags)
    for name, module in model.named_modules():
        if type(module).__module__ == row.module and type(module).__name__ in row.heads:
            report.left[:] = [(where, why) for where, why in report.left if where != "loss"]
            causal_lm.patch_head(name or "model", module, type(module), row.heads[type(module).__name__], on, report)
    return report


def apply_liger_kernel_to_unknown(rope=True, cross_entropy=False, fused_linear_cross_entropy=True, layer_norm=True, rms_norm=True,
                                  swiglu=True, model=None):
    """:func:`patch_unknown` in the form of the other functions, for `MODEL_TYPE_TO_APPLY_LIGER_FN["a_type"] = this`. ValueError
    without `model`: its layers have to be tried."""
    if model is None:
        raise ValueError("apply_liger_kernel_to_unknown() needs the model: there is no row that names its classes")
    patch_unknown(model, rope=rope, cross_entropy=cross_entropy, fused_linear_cross_entropy=fused_linear_cross_entropy,
                  layer_norm=layer_norm, rms_norm=rms_norm, swiglu=swiglu)


def row_of(model):
    """The :class:`Model` row that a model's own classes amount to. ValueError as for :func:`patch_unknown`."""
    home = next((m for cls in (type(module) for module in model.modules()) if (m := _modeling(cls)) is not None), None)
    if home is None:
        raise ValueError(f"{type(model).__name__} has no class of a modelling module of transformers")
    layers, heads = {}, {}  # class name -> what all its modules compute, None when they differ
    for module in model.modules():
        cls = type(module)
        if _modeling(cls) != home:
            continue
        spec = _norm_of(module) or _gated_norm_of(module) or _mlp_of(module) or _experts_of(module)
        layers[cls.__name__] = spec if layers.setdefault(cls.__name__, spec) == spec else None
        if spec is None and cls.__name__ not in heads:
            heads[cls.__name__] = head_of(cls, home)
    norms, mlps = ({n: spec for n, spec in layers.items() if isinstance(spec, kind)} for kind in ((Norm, GatedNorm), Glu))
    function = getattr(sys.modules[f"transformers.models.{home}.modeling_{home}"], "apply_rotary_pos_emb", None)
    rope = _rope_of(function) if inspect.isfunction(function) else None
    return Model(f"{home} (by structure)", with_layer_norm(SWIGLU_PARAMETERS), norms, mlps,
                 {} if rope is None else {"apply_rotary_pos_emb": rope}, {n: head for n, head in heads.items() if head}, modeling=home)


def _modeling(cls):
    """x for a class of transformers.models.x.modeling_x, else None."""
    parts = cls.__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and parts[3:] == [f"modeling_{parts[2]}"] else None


# --- the same results and gradients ---------------------------------------------------------------------------------------------


def _results(function, inputs, parameters=()):
    """Outputs and gradients, or None when the call fails or nothing depends on an input."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    try:
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape).cos() for o in outputs]
        return [*outputs, *torch.autograd.grad(outputs, [*leaves, *parameters], upstream)]
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None


def _same(ours, theirs, tolerance=1e-5):
    return ours is not None and theirs is not None and len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())
        for a, b in zip(ours, theirs, strict=True))


def _takes_one(cls):
    return len(inspect.signature(cls.forward).parameters) == 2


def _random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _small(module, parameters=None, modules=None):
    """A copy of `module` with its settings, but small parameters and modules of its own and no hooks."""
    small = copy.copy(module)
    torch.nn.Module.__init__(small)  # in training mode: random dropout is never the same
    for name, value in (parameters or {}).items():
        small.register_parameter(name, torch.nn.Parameter(value))
    for name, value in (modules or {}).items():
        small.add_module(name, value)
    return small


def _nearest(specs, of):
    """The one of `specs` that computes what the module does, or None; `of(spec, dtype)` are results and gradients, of the module's own
    forward for None."""
    exact, rounded = of(None, torch.float32), of(None, torch.bfloat16)
    candidates = [spec for spec in specs if _same(of(spec, torch.float32), exact)]
    if not candidates or rounded is None:
        return None
    # Those that agree in fp32 differ in where they round: by an ulp in a third of all elements.
    return min(candidates, key=lambda spec: (of(spec, torch.bfloat16)[0] != rounded[0]).sum().item())


def _norm_of(module):
    """How the RMSNorm `module` computes, or None."""
    if module._modules or module._buffers or list(module._parameters) != ["weight"]:
        return None
    if module.weight.dim() != 1 or not _takes_one(type(module)):
        return None
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return None
    inputs = torch.cat([_random(4, _WIDTH, seed=1), 1e-3 * _random(4, _WIDTH, seed=2)])  # some where eps counts

    def of(spec, dtype):
        small = _small(module, {"weight": _random(_WIDTH, seed=3, dtype=dtype)})
        if spec is not None:
            ours = spec.replacement.load()
            small.__dict__.update(offset=spec.offset, casting_mode=spec.casting_mode, in_place=False, row_mode=None, variance_epsilon=eps)
            return _results(functools.partial(ours.forward, small), [inputs.to(dtype)], [small.weight])
        return _results(functools.partial(type(module).forward, small), [inputs.to(dtype)], [small.weight])

    return _nearest(_NORMS, of)


def _gated_norm_of(module):
    """How the RMSNorm with a gate `module` computes, or None."""
    if module._modules or module._buffers or list(module._parameters) != ["weight"] or module.weight.dim() != 1:
        return None
    eps, activation = getattr(module, "variance_epsilon", getattr(module, "eps", None)), getattr(module, "activation", "silu")
    if not isinstance(eps, float) or len(inspect.signature(type(module).forward).parameters) != 3:
        return None
    group_size = _WIDTH // 2 if getattr(module, "group_size", None) else None
    inputs = torch.cat([_random(4, _WIDTH, seed=1), 1e-3 * _random(4, _WIDTH, seed=2)]), 2 * _random(8, _WIDTH, seed=4)

    def of(spec, dtype):
        small = _small(module, {"weight": _random(_WIDTH, seed=3, dtype=dtype)})
        small.__dict__.update(group_size=group_size)
        forward = type(module).forward
        if spec is not None:
            small.__dict__.update(norm_before_gate=spec.norm_before_gate, casting_mode=spec.casting_mode, activation=activation,
                                  variance_epsilon=eps)
            forward = spec.replacement.load().forward
        return _results(functools.partial(forward, small), [t.to(dtype) for t in inputs], [small.weight])

    return _nearest(_GATED_NORMS, of)


def _mlp_of(module):
    """Which gated MLP `module` is, or None."""
    names, cls = {n for n, m in module.named_children() if isinstance(m, torch.nn.Linear)}, type(module)
    sizes = {"gate_proj": (_WIDTH, 6), "up_proj": (_WIDTH, 6), "gate_up_proj": (_WIDTH, 12), "down_proj": (6, _WIDTH)}
    others = {n: m for n, m in module.named_children() if n not in names}
    if names not in ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}) or module._parameters or not _takes_one(cls):
        return None
    if any(list(m.parameters()) for m in others.values()):
        return None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linears = {n: torch.nn.Linear(*sizes[n], bias=module.get_submodule(n).bias is not None) for n in names}
    return _gate_of(_MLPS, cls.forward, _small(module, modules={**linears, **others}))


def _experts_of(module):
    """EXPERTS where `module` computes what LigerExperts do, or None. Compared with the eager forward, below transformers' choice of an
    implementation."""
    if set(module._parameters) != {"gate_up_proj", "down_proj"} or module._buffers or any(list(m.parameters()) for m in module.children()):
        return None
    if {p.dim() for p in module.parameters()} != {3} or module.gate_up_proj.shape[0] != module.down_proj.shape[0]:
        return None
    experts, inner = 3, 6
    shapes = {"gate_up_proj": (experts, 2 * inner, _WIDTH), "down_proj": (experts, _WIDTH, inner)}
    small = _small(module, {n: _random(*shape, seed=seed) for seed, (n, shape) in enumerate(shapes.items(), 3)}, module._modules)
    small.__dict__.update({n: v for n, v in (("num_experts", experts), ("hidden_dim", _WIDTH)) if hasattr(module, n)})
    index = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [0, 2]])
    return _gate_of((EXPERTS,), inspect.unwrap(type(module).forward), small, lambda run: lambda x, w: run(x, index, w),
                    [_random(*index.shape, seed=2)])


def _gate_of(specs, forward, small, call=lambda run: run, others=()):
    """The first of `specs` whose class computes what `forward` does to the module `small`, on small and on large numbers: clamps of the
    gate act on the latter alone. `call` makes a function of tensors, the first of them random and the `others` given."""
    weights, x = list(small.parameters()), _random(5, _WIDTH, seed=1)

    def same(ours, scale):
        return _same(*(_results(call(functools.partial(run, small)), [scale * x, *others], weights) for run in (ours, forward)))

    return next((spec for spec in specs if all(same(spec.replacement.load().forward, scale) for scale in (3, 300))), None)


def _rope_of(function):
    """Which rotation `function(q, k, cos, sin, unsqueeze_dim=1)` is, or None."""
    if list(inspect.signature(function).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None

    def of(rotate, width, unsqueeze_dim):
        shapes = ((2, 3, 5, _WIDTH), (2, 1, 5, _WIDTH)) if unsqueeze_dim == 1 else ((2, 5, 3, _WIDTH), (2, 5, 1, _WIDTH))
        heads = [_random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
        tables = [_random(2, 5, width, seed=seed) for seed in (3, 4)]
        return _results(lambda q, k: rotate(q, k, *tables, unsqueeze_dim=unsqueeze_dim), heads)

    def same(ours):
        whole = all(_same(of(ours, _WIDTH, dim), of(function, _WIDTH, dim)) for dim in (1, 2))
        part = of(function, _WIDTH // 2, 1)  # rotations of whole heads fail here
        return whole and (part is None or _same(of(ours, _WIDTH // 2, 1), part))

    return next((replacement for replacement in _ROPES if same(replacement.load())), None)


# --- the same text --------------------------------------------------------------------------------------------------------------


def _hands_on(statement):
    """Whether a statement returns an output made of the values of the same names, the loss's and the backbone's."""
    call = statement.value if isinstance(statement, ast.Return) else None
    return isinstance(call, ast.Call) and not call.args and all(
        k.arg == (k.value.attr if isinstance(k.value, ast.Attribute) else getattr(k.value, "id", None)) for k in call.keywords)


@functools.cache
def _text(function):
    """The parameters of a forward and its statements, without documentation, annotations and the output that it returns."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    for argument in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs, tree.args.kwarg):
        if argument is not None:
            argument.annotation = None
    statements = [n for n in tree.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    for node in (found for statement in statements for found in ast.walk(statement)):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("annotation")
    return ast.dump(tree.args), *map(ast.dump, statements[:-1] if _hands_on(statements[-1]) else statements)


def head_of(cls, home):
    """The head of a class whose forward is the same text as that of a class with a row, or None."""
    if not cls.__name__.endswith("ForCausalLM") or "forward" not in vars(cls):
        return None
    for name, class_name, router_loss in _LIKE:
        like = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), class_name)
        if _text(journal.replaced_by_us(like, "forward") or like.forward) == _text(cls.forward):
            return Head("unknown", f"{home}__{cls.__name__}", router_loss=router_loss)
    return None
