"""Losses, inputs and error bounds for the tests of the preference losses."""

import dataclasses

import torch

from liger_kernel.chunked_loss import ref
from liger_kernel.chunked_loss.cpo_loss import LigerFusedLinearCPOFunction, LigerFusedLinearCPOLoss
from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOFunction, LigerFusedLinearDPOLoss
from liger_kernel.chunked_loss.kto_loss import LigerFusedLinearKTOFunction, LigerFusedLinearKTOLoss
from liger_kernel.chunked_loss.orpo_loss import LigerFusedLinearORPOFunction, LigerFusedLinearORPOLoss
from liger_kernel.chunked_loss.simpo_loss import LigerFusedLinearSimPOFunction, LigerFusedLinearSimPOLoss
from liger_kernel.core.accuracy import UNIT_ROUNDOFF
from liger_kernel.ops.fused_linear_log_probs.cases import Bounds

IGNORED = -100
U32 = UNIT_ROUNDOFF[torch.float32]


@dataclasses.dataclass
class Loss:
    """A configuration of a loss.

    Attributes:
        name: "dpo", "cpo", "simpo", "orpo" or "kto", as of ref.py.
        module, function: the classes.
        options: of the module's constructor.
        truth: what they are for ref.py.
    """

    name: str
    module: type
    function: type
    options: dict
    truth: dict

    @property
    def has_reference(self):
        return self.name in ("dpo", "kto") and self.options.get("use_ref_model", True)

    @property
    def average(self):
        return self.name in ("simpo", "orpo") or self.truth.get("average", False)

    def loss_options(self):
        """What preference_loss_fn takes besides log-probabilities and targets."""
        names = {"kind": "loss_type", "s": "label_smoothing", "gamma": "gamma", "tau": "discopop_tau", "beta": "beta"}
        return {names[k]: v for k, v in self.truth.items() if k in names}


def _loss(name, module, function, beta=0.1, nll=None, average=False, kind=None, s=0.0, gamma=None, alpha=None, ref_model=True):
    options, truth = {"beta": beta}, {"beta": beta}
    if name == "kto":
        options["use_ref_model"] = ref_model
    if nll is not None:
        options["compute_nll_loss"] = truth["nll"] = nll
    for value, theirs, ours in ((average or None, "average_log_prob", "average"), (kind, "loss_type", "kind"),
                                (s or None, "label_smoothing", "s"), (gamma, "gamma", "gamma"), (alpha, "alpha", "alpha")):
        if value is not None:
            options[theirs] = truth[ours] = value
    if name == "dpo":
        options["use_ref_model"] = ref_model
    return Loss(name, module, function, options, truth)


def _dpo(**options):
    return _loss("dpo", LigerFusedLinearDPOLoss, LigerFusedLinearDPOFunction, **{"nll": False, "kind": "sigmoid", **options})


def _cpo(**options):
    return _loss("cpo", LigerFusedLinearCPOLoss, LigerFusedLinearCPOFunction, **{"nll": True, **options})


def _simpo(**options):
    return _loss("simpo", LigerFusedLinearSimPOLoss, LigerFusedLinearSimPOFunction, **{"nll": False, "gamma": 0.5, **options})


def _orpo(**options):
    return _loss("orpo", LigerFusedLinearORPOLoss, LigerFusedLinearORPOFunction, **{"nll": True, **options})


def _kto(**options):
    return _loss("kto", LigerFusedLinearKTOLoss, LigerFusedLinearKTOFunction, **options)


KINDS = ["sigmoid", "hinge", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop"]
SMOOTHED = {"exo_pair": 1e-3, "robust": 0.2}

PAIRED = {
    **{f"dpo {kind}": _dpo(kind=kind, s=SMOOTHED.get(kind, 0.0)) for kind in KINDS},
    "dpo without reference": _dpo(ref_model=False, beta=0.3),
    "dpo average, nll": _dpo(average=True, nll=True, alpha=0.5, beta=2.0),
    "cpo": _cpo(),
    "cpo smoothed, average": _cpo(s=0.1, average=True, alpha=2.0, beta=1.5),
    "cpo without nll": _cpo(nll=False),
    "simpo": _simpo(beta=2.0),
    "simpo with nll": _simpo(nll=True, alpha=0.3, s=0.1, gamma=1.0),
    "orpo": _orpo(beta=0.5),
    "orpo without nll": _orpo(nll=False),
}
KTO = {"kto": _kto(), "kto average": _kto(average=True, beta=1.0), "kto without reference": _kto(ref_model=False, beta=0.02)}


@dataclasses.dataclass
class Batch:
    """Inputs of a loss; `reference` is (input, weight, bias) or None, `desirable` and `kl` are KTO's."""

    x: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None = None
    reference: tuple | None = None
    desirable: torch.Tensor | None = None
    kl: torch.Tensor | None = None

    def trained(self):
        return [t for t in (self.x, self.weight, self.bias) if t is not None]

    def to(self, dtype=None, requires_grad=True):
        """A copy whose input, weight and bias are leaves, all floats of `dtype`."""
        def copy(t):
            return None if t is None else t.detach().to(dtype or t.dtype, copy=True)

        x, weight, bias = (None if t is None else copy(t).requires_grad_(requires_grad) for t in (self.x, self.weight, self.bias))
        return dataclasses.replace(self, x=x, weight=weight, bias=bias, kl=None if self.kl is None else self.kl.to(dtype or torch.float32),
                                   reference=None if self.reference is None else tuple(map(copy, self.reference)))


def make(loss, dtype, device, sequences=6, length=7, hidden=33, vocab=129, bias=True, ignored=True, seed=0):
    """A batch. Sequences have prompts and padding of various lengths that are ignored, unless `ignored` is False; the reference model is
    near the trained one, and of another width."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g) * scale).to(device=device, dtype=dtype)

    x, weight = normal(sequences, length, hidden), normal(vocab, hidden, scale=0.3)
    target = torch.randint(vocab, (sequences, length), generator=g)
    if ignored:
        for i in range(sequences):
            target[i, : i % 3] = IGNORED
            target[i, length - (i * 2) % 4:] = IGNORED
    reference = None
    if loss.has_reference:
        wide = torch.cat([x.float().cpu(), torch.randn(sequences, length, 3, generator=g)], -1)
        head = torch.cat([weight.float().cpu(), torch.randn(vocab, 3, generator=g) * 0.1], -1)
        reference = (wide.to(device, dtype), head.to(device, dtype), normal(vocab, scale=0.3) if bias else None)
    desirable = torch.randint(2, (sequences,), generator=g).bool().to(device) if loss.name == "kto" else None
    return Batch(x, weight, target.to(device), normal(vocab, scale=0.3) if bias else None, reference, desirable,
                 torch.tensor(0.7, device=device) if loss.name == "kto" else None)


def ours(loss, batch, **extra):
    """(loss, metrics) by the module."""
    module = loss.module(**loss.options)
    reference = dict(zip(("ref_input", "ref_weight", "ref_bias"), batch.reference, strict=True)) if batch.reference else {}
    if loss.name == "kto":
        extra |= {"preference_labels": batch.desirable, "kl": batch.kl}
    return module(_input=batch.x, lin_weight=batch.weight, target=batch.target, bias=batch.bias, **reference, **extra)


def plain(loss, batch, **extra):
    """(loss, metrics) by ref.py, in the batch's dtype."""
    if loss.name == "kto":
        return ref.kto(batch.x, batch.weight, batch.target, batch.desirable, batch.bias, batch.reference, batch.kl, **loss.truth)
    return ref.paired(loss.name, batch.x, batch.weight, batch.target, batch.bias, batch.reference, **loss.truth, **extra)


def gradients(value, batch):
    return torch.autograd.grad(value, batch.trained(), allow_unused=True)


class LossBounds:
    """Absolute errors allowed in the loss, the sequences' log-probabilities and dx, dw, db.

    A token's log-probability is off by as much as :class:`Bounds` says, a sequence's by their sum (or mean), s by `delta`. To first
    order the loss is off by |dL/ds| delta, and a sequence's coefficient dL/ds by |d2L/ds2| delta: to the bound of the gradients for
    given coefficients comes that drift times |d logp / dx|, |d logp / dw|."""

    def __init__(self, loss, batch):
        self.dtype = batch.x.dtype
        b = batch.to(torch.float64, requires_grad=False)
        valid = b.target != IGNORED
        count = valid.sum(-1).clamp(min=1).double() if loss.average else torch.ones(b.target.shape[0], device=b.x.device).double()

        def sums(x, weight, bias):
            return ref.sequence_log_probs(x, weight, b.target, bias, IGNORED, loss.average)[0]

        s = sums(b.x, b.weight, b.bias)
        delta = self._sequences(batch.x, batch.weight, batch.bias, batch, valid, count)
        s0 = None
        if b.reference:
            s0 = sums(*b.reference)
            delta = delta + self._sequences(*batch.reference, batch, valid, count)

        def value(s):
            options, ratios = loss.loss_options(), s if s0 is None else s - s0
            if loss.name == "kto":
                return loss.function.preference_loss_fn(ratios, b.desirable, b.target, kl=b.kl, **options)[0]
            return loss.function.preference_loss_fn(*ratios.chunk(2), b.target, **options)[0]

        slope = torch.func.grad(value)(s)
        drift = torch.func.hessian(value)(s).abs() @ delta
        own = slope / count
        tokens = (own[:, None] * valid).clone()
        nll = 0.0
        if loss.truth.get("nll"):
            n, total = s.shape[0] // 2, valid[: s.shape[0] // 2].sum().clamp(min=1)
            alpha = loss.truth.get("alpha", 1.0)
            tokens[:n] -= alpha * valid[:n] / total
            nll = alpha * float((self._tokens[:n] * valid[:n]).sum() / total)
        self.logps = delta
        size = float(value(s).abs()) + float((slope.abs() * (s.abs() + (0 if s0 is None else s0.abs()))).sum())
        self.loss = float((slope.abs() * delta + 0.5 * drift * delta).sum()) + nll + 64 * U32 * (size + 1)
        moved = (drift / count + 64 * U32 * own.abs())[:, None] * valid
        self._parts = Bounds(batch.x, batch.weight, batch.target, batch.bias, (tokens.abs() + moved, None, None))
        p = torch.softmax(torch.nn.functional.linear(b.x, b.weight, b.bias), -1)
        hot = torch.zeros_like(p).scatter_(-1, torch.where(valid, b.target, 0)[..., None], 1.0)
        moved = (moved[..., None] * (hot - p).abs()).flatten(0, 1)
        self._moved = (moved @ b.weight.abs(), moved.mT @ b.x.flatten(0, 1).abs(), moved.sum(0))
        self._shape = b.x.shape

    def _sequences(self, x, weight, bias, batch, valid, count):
        self._tokens_of = Bounds(x, weight, batch.target, bias).logp.view(valid.shape)
        if x is batch.x:
            self._tokens = self._tokens_of
        return (self._tokens_of * valid).sum(-1) / count

    def gradients(self):
        parts = (self._parts.dx(), self._parts.dw(), self._parts.db())
        dx, dw, db = (2 * a + b for a, b in zip(parts, self._moved, strict=True))  # twice: saved and scaled, each rounded
        return dx.view(self._shape), dw, db
