"""One arm of `liger memory`, in a process of its own: peak memory of a step at every point, the bytes that each op saves, and the
largest batch or sequence that fits. Reports by cli/child.py."""

import gc

from liger_kernel.cli.child import emit
from liger_kernel.cli.memory import formulas
from liger_kernel.cli.profile.phases import peaks_of_a_step
from liger_kernel.cli.profile.worker import guarded
from liger_kernel.cli.step import worker as step_worker

SMALLEST = 2  # tokens of the step that makes the optimizer's states


def release(cuda):
    import torch

    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


def attempt(call, cuda):
    """(what `call` returns, None), or (None, the message) when memory ran out; what it held is released then."""
    try:
        return call(), None
    except Exception as e:
        if not step_worker.out_of_memory(e):
            raise
        message = str(e).strip().splitlines()[0][:300]
    release(cuda)  # out here nothing refers to the error's frames any more
    return None, message


class Training:
    """A model with optimizer states, at one vocabulary."""

    def __init__(self, config, vocab):
        import torch

        self.cuda, self.device, self.vocab = config["device"] != "cpu", config["device"], vocab
        self.model = step_worker.build(config | {"model": config["model"] | {"vocab_size": vocab}})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=step_worker.LEARNING_RATE, fused=True)
        self.peaks(1, SMALLEST)  # makes the states
        self.state = step_worker.state_bytes(self.model, self.optimizer)

    def tokens(self, batch, seq):
        import torch

        return torch.randint(self.vocab, (batch, seq), generator=torch.Generator().manual_seed(0)).to(self.device)

    def peaks(self, batch, seq):
        """{phase: peak bytes} of one step."""
        state = step_worker.state_bytes(self.model, self.optimizer)
        try:
            return peaks_of_a_step(self.model, self.optimizer, self.tokens(batch, seq), state["weights"] + state["optimizer"])
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def saved(self, batch, seq):
        """What `saved.saved_bytes` finds, with gradient checkpointing switched off for that forward."""
        from liger_kernel.cli.memory.saved import saved_bytes

        disable = getattr(self.model, "activation_checkpointing_disable", None) or self.model.gradient_checkpointing_disable
        disable()
        tokens = self.tokens(batch, seq)
        return saved_bytes(self.model(input_ids=tokens, labels=tokens).loss, self.model.parameters())


def points(config):
    """A "point" for each; those of one vocabulary share a model. Then "saved" for one sequence of the last."""
    cuda, training = config["device"] != "cpu", None
    for vocab, batch, seq in config["points"]:
        point, peaks, error = {"vocab": vocab, "batch": batch, "seq": seq}, None, None
        if training is None or training.vocab != vocab:
            training = None
            release(cuda)
            training, error = attempt(lambda vocab=vocab: Training(config, vocab), cuda)
        if error is None:
            peaks, error = attempt(lambda training=training, batch=batch, seq=seq: training.peaks(batch, seq), cuda)
        if error is None:
            emit(event="point", status="ok", state_bytes=training.state, peak_bytes=peaks, **point)
        else:
            emit(event="point", status="out of memory", error=error, **point)
    if training is not None:
        release(cuda)
        rows, error = attempt(lambda: training.saved(1, seq), cuda)
        emit(event="saved", vocab=vocab, batch=1, seq=seq, ops=rows, error=error)


def fit(config):
    """The largest "batch" or "seq" whose step stays within the limit: CUDA's memory, or `limit` bytes of torch's allocations."""
    import torch

    what, cuda, limit = config["fit"], config["device"] != "cpu", config["limit"]
    if cuda:
        free, total = torch.cuda.mem_get_info()
        if limit and limit < total:
            torch.cuda.set_per_process_memory_fraction(limit / total)
        limit = min(limit or free, free)
    entries, size = config["model"], {"batch": config["batch"], "seq": config["seq"]}
    guess = fits_by_formula(config, entries, limit)
    training, error = attempt(lambda: Training(config, entries["vocab_size"]), cuda)

    def fits(n):
        release(cuda)
        peaks, error = attempt(lambda: training.peaks(**size | {what: n}), cuda)
        peak = max(peaks.values()) if error is None else None
        good = error is None and (cuda or peak <= limit)
        emit(event="try", n=n, fits=good, peak=peak)
        return good

    found = formulas.largest(fits, guess or 1, config["resolution"], config["most"]) if error is None else 0
    emit(event="fit", what=what, largest=found, limit=limit, predicted=guess, error=error, resolution=config["resolution"],
         capped=found == config["most"])


def fits_by_formula(config, entries, limit):
    """The same by the formulae; None for a model that they do not describe."""
    try:
        shape = formulas.Shape.of(entries)
    except ValueError:
        return None
    size = {"batch": config["batch"], "seq": config["seq"]}

    def fits(n):
        return formulas.predict(shape, config["arm"], **size | {config["fit"]: n}, dtype=config["dtype"],
                                checkpointing=config["checkpointing"], device=config["device"].partition(":")[0],
                                native=config["native"])["peak"] <= limit

    return formulas.largest(fits, most=config["most"])


def main(config):
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if config["device"] != "cpu":
        torch.cuda.set_device(config["device"])
    (fit if config["fit"] else points)(config)


if __name__ == "__main__":
    guarded(main)
