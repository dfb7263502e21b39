"""TRL's trainers with and without use_liger_kernel: the cases, how one is run, and what of two runs is compared.

test_trl_losses.py holds each case to its bounds; scripts/trl-equality writes the differences down. Both run in the environments of
scripts/consumer-env, where TRL is.

A run is some steps of plain SGD on a tiny random fp32 model. SGD and not Adam, which turns a gradient's last bit into a whole step
where the gradient is near zero: with SGD, what differs after some steps is what the losses and gradients differed by.
"""

import contextlib
import importlib
import json
import os
import pathlib
import sys
import tempfile
import typing
import warnings

import datasets
import torch
import transformers
import trl
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from liger_kernel.patch import tiny, unpatch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from tools import CHAT, sentences, texts, tokenizer

VERSION = Version(trl.__version__)
BATCH, COMPLETION = 4, 12
ACCUMULATIONS = (1, 2)

# An fp32 gradient is a chain of dozens of rounded operations over some hundred terms, each good to 6e-8 of its size: some 1e-6 of the
# gradient in all. A wrong factor, mask or average is off by 1e-2 or more.
BOUNDS = {
    "loss": 1e-5,  # |ours - theirs| / max(0.1, |theirs|)
    "gradient": 1e-5,  # |ours - theirs| / |theirs|, norms of the vector of all the model's gradients
    "norm": 1e-5,  # |ours - theirs| / |theirs|, of the logged gradient norms
    "metric": 1e-5,  # |ours - theirs| / max(1, |theirs|): metrics are differences of log-probabilities of some tens
}


class Case(typing.NamedTuple):
    """One comparison: a trainer with options of its configuration.

    unequal: {"loss", a metric or its beginning: why TRL's two paths differ there by design}. With "loss", losses and gradients are
    expected to differ, and nothing is bounded.
    adjust: what is done to the fused trainer before it trains, for what TRL's configuration cannot say.
    condition: what the loss multiplies its argument's rounding by; the bounds are multiplied by it too.
    same_prompts: whether all prompts are of one length.
    """

    trainer: str
    name: str
    options: dict = {}
    unequal: dict = {}
    adjust: typing.Callable | None = None
    accumulations: tuple = ACCUMULATIONS
    condition: float = 1.0
    same_prompts: bool = False

    def __str__(self):
        return f"{self.trainer} {self.name}"


class Run(typing.NamedTuple):
    gradients: list  # of a step: all the model's gradients, one fp64 vector
    logs: list  # of a step: {name: value}, the loss and the gradient norm among them


class Differences(typing.NamedTuple):
    """The largest over the steps, as BOUNDS defines them."""

    loss: float
    gradient: float
    norm: float
    metrics: dict  # {name: difference}, of the metrics that both runs log
    missing: list  # metrics that only the plain run logs


# Where TRL keeps the fused loss, and the trainers that have one. SFT's is in the model's forward; ORPO and CPO have none.
LOSSES = ("liger_loss", "liger_loss_fn", "liger_grpo_loss", "liger_jsd_loss", "kto_loss_fn")
FUSED = ("DPO", "KTO", "GRPO", "Distillation", "GKD", "GOLD", "IWOPD", "SDFT", "SDPO")

# Metrics under another name in the fused path: {ours: theirs}.
SAME = {"clip_ratio": ("clip_ratio/region_mean", "cispo_clip_ratio")}
NO_METRICS = ("epoch", "learning_rate", "step_time", "loss", "grad_norm", "clip_ratio/low", "clip_ratio/high")

LOGITS = "TRL's own is the mean logit of completion tokens; the fused loss's is over all positions, in KTO its sum over a sequence"
SMOOTHING = "TRL does not hand `label_smoothing` to the fused loss"
SEQUENCE_CLIP = "TRL's own is a mean over sequences; the fused loss's counts a sequence's tokens"
DELTA_CLIP = "TRL's own takes the ratio after `delta`; the fused loss's before"
LUSPO = "TRL's own leaves masked tokens out of the sum; in the fused loss, as in Liger Kernel's, they count"
TOKENS = "TRL 0.29 does not hand the batch's token count to the fused loss: it averages micro-batches, TRL's own all the tokens"
SEQUENCES = "the metric alone: TRL's own averages over tokens; beside the fused loss, over sequences as the loss does"
GKD_MIX = "TRL 0.29 leaves the fused loss's weights at one half cross entropy and one half divergence; TRL's own is divergence alone"
GKD_PROMPTS = "TRL 0.29's own cuts every sequence at the longest prompt of the batch; the fused loss counts all completion tokens"


def cases():
    """The installed TRL's."""
    new = Version("1.0") <= VERSION
    logits = {"logits/": LOGITS}
    found = [Case("SFT", "nll"), Case("SFT", "dft", {"loss_type": "dft"})]
    found += [Case("DPO", name, {"loss_type": [name]}, logits) for name in (
        "sigmoid", "robust", "hinge", "nca_pair", "bco_pair", "apo_zero", "apo_down")]
    found += [Case("DPO", "sppo_hard", {"loss_type": ["sppo_hard"], "learning_rate": 1e-3}, logits),  # a square: its gradient is large
              Case("DPO", "discopop", {"loss_type": ["discopop"], "beta": 0.1}, logits, condition=20)]  # a sigmoid of D / 0.05
    found += [Case("DPO", "robust, label smoothing", {"loss_type": ["robust"], "label_smoothing": 0.1}, {**logits, "loss": SMOOTHING}),
              Case("KTO", "kto", {}, logits)]

    def grpo(name, level="token", unequal=None, accumulations=ACCUMULATIONS, **options):
        loss = name.split(",")[0]
        options = {"loss_type": loss, "importance_sampling_level": level, **options}
        if loss == "cispo":
            options["epsilon_high"] = 1.02  # the bound of the ratio itself
        return Case("GRPO", f"{name}, {level}", options, {**({"clip_ratio": SEQUENCE_CLIP} if level == "sequence" else {}),
                                                          **(unequal or {})}, None, accumulations)

    by_tokens = ("dapo", "cispo", "vespo")
    full = {"generation_kwargs": {"min_new_tokens": COMPLETION}}  # all completions of one length
    for loss in ("grpo", "bnpo", "dr_grpo", *by_tokens, "sapo"):
        if new:
            found += [grpo(loss, beta=0.1)]
        elif loss in by_tokens[:2]:
            found += [grpo(loss, beta=0.1, accumulations=(1,)), grpo(f"{loss}, equal lengths", beta=0.1, **full),
                      grpo(f"{loss}, lengths that differ", beta=0.1, unequal={"loss": TOKENS}, accumulations=(2,))]
        elif loss != "vespo":  # which 0.29 does not have
            found += [grpo(loss, beta=0.1)]
    found += [grpo("grpo, no KL", beta=0.0)]
    if new:
        found += [grpo(loss, "sequence", beta=0.1) for loss in ("grpo", "bnpo", "dr_grpo", "dapo")]
        found += [grpo("luspo", "sequence", beta=0.0), grpo("luspo, equal lengths", beta=0.1, **full),
                  grpo("luspo, lengths that differ", beta=0.1, unequal={"loss": LUSPO}),
                  grpo("grpo, delta", beta=0.1, delta=1.02, unequal={"clip_ratio": DELTA_CLIP}),
                  grpo("grpo, corrected KL", beta=0.1, use_bias_correction_kl=True)]
        found += [Case("Distillation", f"beta {beta}", {"beta": beta, "temperature": 0.8}) for beta in (0.0, 0.5, 1.0)]
        found += [Case("GKD", f"beta {beta}", {"beta": beta}) for beta in (0.0, 0.3, 1.0)]
        found += [Case("GOLD", "JSD", {"beta": 0.3, "use_uld_loss": False}),
                  Case("IWOPD", "JSD", {"beta": 0.3, "distillation_objective": "jsd", "loss_top_k": 0, "lmbda": 0.0}),
                  Case("SDFT", "JSD", {"distillation_alpha": 0.3}, {"self_distillation/distillation_loss": SEQUENCES, "sdft/": SEQUENCES}),
                  Case("SDPO", "JSD", {"distillation_alpha": 0.3, "loss_type": "bnpo"},
                       {"self_distillation/distillation_loss": SEQUENCES, "sdpo/": SEQUENCES})]
    else:
        gkd = lambda name, beta, unequal=None, adjust=divergence_only, same=True: Case(
            "GKD", f"beta {beta}, {name}", {"beta": beta, "temperature": 1.0}, unequal or {}, adjust, same_prompts=same)
        found += [gkd("divergence only, equal prompts", beta) for beta in (0.0, 0.3, 1.0)]
        found += [gkd("divergence only, prompts that differ", 0.3, {"loss": GKD_PROMPTS}, same=False),
                  gkd("as TRL sets it, equal prompts", 0.3, {"loss": GKD_MIX}, None)]
    # These take layers and head from here; LigerORPOTrainer the fused loss too.
    found += [Case("ORPO", "TRL's trainer"), Case("ORPO", "LigerORPOTrainer"), Case("CPO", "sigmoid"),
              Case("CPO", "simpo", {"loss_type": "simpo", "cpo_alpha": 0.0})]
    return found


def divergence_only(trainer):
    trainer.liger_jsd_loss.weight_hard_loss, trainer.liger_jsd_loss.weight_soft_loss = 0.0, 1.0


HOMES = {"KTO": "kto", "ORPO": "orpo", "CPO": "cpo", "GKD": "gkd", "GOLD": "gold", "IWOPD": "iw_opd", "SDFT": "sdft", "SDPO": "sdpo"}


def classes(trainer):
    """-> (trainer class, configuration class), from trl or from its experimental part."""
    own = trainer not in HOMES or (trainer == "KTO" and Version("1.0") <= VERSION)
    home = trl if own else importlib.import_module(f"trl.experimental.{HOMES[trainer]}")
    return getattr(home, f"{trainer}Trainer"), getattr(home, f"{trainer}Config")


def byte_tokenizer():
    """Of single bytes: GOLD asks for a byte-level one."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=CHAT)


def reward(completion_ids, **_):
    """A number of the completion that is hardly ever that of another."""
    return [(7 * sum(ids) % 101) / 101 for ids in completion_ids]


def data(trainer, same_prompts=False):
    lines = sentences(24)
    first, second, third = lines[:8], lines[8:16], lines[16:]
    if same_prompts:
        first = [" ".join(line.split()[:5]) for line in first]
    after = lambda sentences: [" " + text for text in sentences]
    if trainer == "SFT":
        return texts()
    if trainer in ("GKD", "GOLD", "IWOPD"):
        table = {"messages": [[{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
                              for prompt, answer in zip(first, second, strict=True)]}
    else:
        table = {"prompt": first}
        if trainer in ("DPO", "ORPO", "CPO"):
            table |= {"chosen": after(second), "rejected": after(third)}
        if trainer == "KTO":
            table |= {"completion": after(second), "label": [i % 3 != 0 for i in range(8)]}
        if trainer in ("SDFT", "SDPO"):
            table["privileged_context"] = second
    return datasets.Dataset.from_dict(table)


def settings(trainer):
    """The configuration's options that all cases of the trainer share."""
    common = dict(
        per_device_train_batch_size=BATCH, max_steps=3, learning_rate=0.05, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
        use_cpu=True, logging_steps=1, save_strategy="no", report_to=[], seed=0, disable_tqdm=True, bf16=False,
        gradient_checkpointing=False)
    preference = dict(max_length=32, beta=0.3)
    sampled = dict(max_completion_length=COMPLETION)
    mine = {
        "SFT": dict(max_length=32), "DPO": preference, "KTO": preference, "ORPO": preference, "CPO": preference,
        # a second pass over the same completions, and large steps, take the ratios away from one and beyond these narrow clips
        "GRPO": dict(sampled, num_generations=2, num_iterations=2, epsilon=0.02, epsilon_high=0.03, learning_rate=0.2, max_steps=4),
        "Distillation": sampled, "GKD": dict(max_length=32, lmbda=0.0), "GOLD": dict(sampled, max_length=160, lmbda=0.0),
        "IWOPD": dict(sampled, max_length=32),
        "SDFT": dict(sampled, distillation_mode="full_logits", distillation_is_clip=None, num_generations=2),
        "SDPO": dict(sampled, distillation_mode="full_logits", distillation_is_clip=None, num_generations=2, success_reward_threshold=0.2,
                     distillation_weight=1.0),
    }[trainer]
    return {**common, **mine}


def run(case, ours, accumulation, dtype=torch.float32):
    """Trains from the same seed, with the kernels or without. -> Run"""
    cls, configuration = classes(case.trainer)
    if case.name == "LigerORPOTrainer" and ours:
        from liger_kernel.transformers.trainer import LigerORPOTrainer as cls
    words = byte_tokenizer() if case.trainer == "GOLD" else tokenizer()
    model = lambda seed, **changes: tiny.causal_lm("llama", seed=seed, vocab_size=len(words), **changes).to(dtype)
    record = Run([], [])

    class Keep(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            record.gradients.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))

        def on_log(self, args, state, control, logs=None, **_):
            if "train_runtime" not in logs:
                record.logs.append({name: float(value) for name, value in logs.items()})

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        trained = model(0)
        more = {}
        if case.trainer in ("DPO", "KTO"):
            more["ref_model"] = model(1)
        if case.trainer in ("GKD", "GOLD", "IWOPD", "Distillation"):
            more["teacher_model"] = model(1, hidden_size=96)
        if case.trainer == "IWOPD":  # asks for the teacher's tokenizer by name
            words.save_pretrained(folder)
            more["teacher_model"].config._name_or_path = folder
        if case.trainer in ("GRPO", "SDPO"):
            more["reward_funcs"] = [reward]
        if case.trainer in ("GRPO", "SDFT", "SDPO"):  # these load a reference by the model's name
            trained.save_pretrained(folder)
            trained.config._name_or_path = folder
        arguments = configuration(output_dir=folder, use_liger_kernel=ours, gradient_accumulation_steps=accumulation,
                                  **{**settings(case.trainer), **case.options})
        trainer = cls(model=trained, args=arguments, train_dataset=data(case.trainer, case.same_prompts), processing_class=words,
                      callbacks=[Keep()], **more)
        if ours and case.adjust:
            case.adjust(trainer)
        calls = []
        for loss in filter(None, (getattr(trainer, name, None) for name in LOSSES)):
            assert type(loss).__module__.startswith("liger_kernel.")
            loss.register_forward_hook(lambda *_: calls.append(1))
        trainer.train()
        patched = "LigerRMSNorm" in repr(trainer.model)
        unpatch(trainer.model)
    assert patched == ours, f"{case}: the model is {'not ' if ours else ''}patched"
    assert bool(calls) == (ours and case.trainer in FUSED), f"{case}: {len(calls)} calls of the fused loss"
    return record


def difference(ours, theirs, floor):
    """Infinite where a NaN is: max() would drop it."""
    value = abs(ours - theirs) / max(floor, abs(theirs))
    return value if value == value else float("inf")


def compare(ours, theirs):
    """-> Differences of two runs"""
    assert len(ours.logs) == len(theirs.logs) == len(ours.gradients) == len(theirs.gradients)
    assert max(float(gradient.norm()) for gradient in theirs.gradients) > 1e-3, "nothing to compare"
    steps = list(zip(ours.logs, theirs.logs, strict=True))
    worst = lambda name, floor: max(difference(a[name], b[name], floor) for a, b in steps)
    metrics, seen = {}, set()
    for a, b in steps:
        for name, value in a.items():
            theirs_name = next((other for other in SAME.get(name, ()) if other in b), name)
            if theirs_name in b and not name.startswith(NO_METRICS):
                metrics[name] = max(metrics.get(name, 0.0), difference(value, b[theirs_name], 1.0))
                seen.add(theirs_name)
    missing = sorted({name for _, b in steps for name in b} - seen - {name for a, _ in steps for name in a})
    size = lambda vector: float(vector.norm())
    gradient = max(difference(size(a - b), 0.0, 1.0) / max(size(b), 1e-12)
                   for a, b in zip(ours.gradients, theirs.gradients, strict=True))
    return Differences(worst("loss", 0.1), gradient, worst("grad_norm", 1e-12), metrics,
                       [name for name in missing if not name.startswith(NO_METRICS)])


def outside(case, found):
    """What of the differences is beyond its bound and is not said to be. -> {what: difference}"""
    if "loss" in case.unequal:
        return {}
    values = {"loss": found.loss, "gradient": found.gradient, "norm": found.norm}
    bounds = {name: BOUNDS[name] for name in values}
    for name, value in found.metrics.items():
        if not any(name.startswith(other) for other in case.unequal):
            values[name], bounds[name] = value, BOUNDS["metric"]
    return {name: value for name, value in values.items() if not value <= case.condition * bounds[name]}


def quietly(function, *arguments):
    """The trainers print their logs."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        return function(*arguments)


def measure(case, accumulation):
    """One row of the equality table: the differences of the two runs, and each one's distance from TRL's own run in fp64."""
    theirs, ours = (quietly(run, case, use, accumulation) for use in (False, True))
    exact = quietly(run, case, False, accumulation, torch.float64)
    found = compare(ours, theirs)
    unequal = {name: why for name, why in case.unequal.items() if name == "loss" or any(
        metric.startswith(name) and value > BOUNDS["metric"] for metric, value in found.metrics.items())}
    named = {name: value for name, value in found.metrics.items() if not any(name.startswith(other) for other in case.unequal)}
    return {
        "trainer": case.trainer, "case": case.name, "trl": str(VERSION), "accumulation": accumulation, "steps": len(ours.logs),
        "loss": found.loss, "gradient": found.gradient, "norm": found.norm, "metrics": found.metrics,
        "worst_metric": max(named, key=named.get, default=None), "not_logged": found.missing,
        "ours_from_fp64": compare(ours, exact).gradient, "theirs_from_fp64": compare(theirs, exact).gradient,
        "bounds": {name: case.condition * bound for name, bound in BOUNDS.items()}, "unequal_by_design": unequal,
        "outside": outside(case, found)}


def main(path):
    """Writes all rows of the installed TRL, and the versions, to a file."""
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    rows = []
    for case in cases():
        for accumulation in case.accumulations:
            rows.append(measure(case, accumulation))
    versions = {"trl": str(VERSION), "transformers": transformers.__version__, "torch": torch.__version__}
    pathlib.Path(path).write_text(json.dumps({"versions": versions, "bounds": BOUNDS, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1])
