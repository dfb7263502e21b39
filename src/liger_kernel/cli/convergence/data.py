"""What `liger convergence` trains on: text files, a data set on disk, or a synthetic source that needs neither.

A batch is a function of the step alone, so that a run which stops and continues sees what an uninterrupted one does.
"""

import hashlib
import json
import os
import pathlib

import numpy as np

STANDARD = "stdlib"  # the sources of Python's standard library, as `liger demo` trains on
SUFFIXES = {".txt", ".md", ".rst", ".py", ".json", ".jsonl", ".csv", ".html", ".tex", ".c", ".h", ".cpp", ".hpp", ".cu", ".js", ".java"}
BPE_MEGABYTES = 32  # text that a tokenizer is trained on
BYTES_VOCABULARY = 257  # every byte, and the end of a text


def text_files(paths):
    """Every text file of files and folders, in a fixed order.

    Raises:
        ValueError: a path that is not there, or no text under any of them.
    """
    found = []
    for path in map(pathlib.Path, paths):
        if not path.exists():
            raise ValueError(f"--data {path} is not there")
        found += [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not found:
        raise ValueError(f"--data {', '.join(map(str, paths))} holds no text: files end in {', '.join(sorted(SUFFIXES))}")
    return found


def is_dataset(path):
    """Whether `datasets.load_from_disk` takes a folder."""
    return (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()


def _of_dataset(path):
    from liger_kernel.cli import require

    require("datasets", purpose=f"--data {path}, a data set saved on disk,")
    import datasets

    loaded = datasets.load_from_disk(str(path))
    loaded = loaded[sorted(loaded)[-1] if "train" not in loaded else "train"] if isinstance(loaded, dict) else loaded
    column = next((name for name, kind in loaded.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")), None)
    if column is None:
        raise ValueError(f"--data {path} has no column of text")
    for row in loaded:
        yield row[column]


def texts(sources):
    """The texts of --data, one after the other."""
    if list(sources) == [STANDARD]:
        from liger_kernel.cli.demo.data import corpus

        yield from corpus()
        return
    for source in map(pathlib.Path, sources):
        if source.is_dir() and is_dataset(source):
            yield from _of_dataset(source)
        else:
            for path in text_files([source]):
                yield path.read_text(encoding="utf-8", errors="replace")


def _key(sources, tokenizer, vocab, wanted):
    """Names what a token file was made from: another text, tokenizer or length is another file."""
    stamp = [tokenizer, vocab, wanted]
    for source in sources:
        path = pathlib.Path(source)
        files = [] if source == STANDARD else [path] if path.is_file() or is_dataset(path) else text_files([path])
        stamp.append([str(source), [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]])
    return hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:16]


def _train_bpe(sources, vocab):
    """A byte-level BPE of the text's first megabytes; the trainer is deterministic."""
    import tokenizers

    def some():
        left = BPE_MEGABYTES * 1_000_000
        for text in texts(sources):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.train_from_iterator(some(), tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, show_progress=False, special_tokens=["<eos>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return made


def _encoder(sources, tokenizer, vocab):
    """(list of texts -> array of ids, entries of its vocabulary)."""
    if tokenizer == "bytes":
        return lambda batch: np.concatenate([[*t.encode(), BYTES_VOCABULARY - 1] for t in batch]).astype(np.int32), BYTES_VOCABULARY
    from liger_kernel.cli import require

    require("tokenizers", purpose=f"--tokenizer {tokenizer}")
    import tokenizers

    if tokenizer == "bpe":
        made, end = _train_bpe(sources, vocab), [0]
    else:
        path = pathlib.Path(tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.exists():
            raise ValueError(f"--tokenizer is {tokenizer!r}, expected bytes, bpe or a folder with a tokenizer.json")
        made, end = tokenizers.Tokenizer.from_file(str(path)), []

    def encode(batch):
        return np.concatenate([np.asarray(e.ids + end, dtype=np.int32) for e in made.encode_batch(batch)])

    return encode, made.get_vocab_size()


def _facts(path, made):
    """What is kept beside a token file, with a digest of it, which alone tells another text of as many tokens."""
    if "digest" not in made:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
        made["digest"] = digest.hexdigest()[:16]
        path.with_suffix(".json").write_text(json.dumps(made) + "\n")
    return made | {"path": str(path)}


def prepare(folder, sources, tokenizer, vocab, wanted, say=lambda text: None):
    """Makes a file of int32 tokens in `folder`, unless it is there: {kind, path, tokens, used, digest}.

    Args:
        folder: kept between runs.
        sources: files, folders, data sets on disk, or [STANDARD].
        tokenizer: "bytes", "bpe" (trained here, of `vocab` entries at most) or a folder with a tokenizer.json.
        vocab: entries of the model's vocabulary.
        wanted: tokens after which to stop reading; less text is read again in training.

    Raises:
        ValueError: no text, no tokenizer, or one whose vocabulary is larger than the model's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tokens-{_key(sources, tokenizer, vocab, wanted)}.bin"
    facts = path.with_suffix(".json")
    if facts.exists():
        return _facts(path, json.loads(facts.read_text()))
    say("training a tokenizer" if tokenizer == "bpe" else "reading the text")
    encode, used = _encoder(sources, tokenizer, vocab)
    if used > vocab:
        raise ValueError(f"the tokenizer has {used} entries, the model's vocabulary {vocab}; use a larger model or another --tokenizer")
    count, partial = 0, path.with_suffix(".part")
    with partial.open("wb") as file:
        batch, size = [], 0
        for text in texts(sources):
            batch.append(text)
            size += len(text)
            if size >= 1 << 24:
                ids, batch, size = encode(batch), [], 0
                ids.tofile(file)
                count += len(ids)
                say(f"{count:,} tokens")
                if count >= wanted:
                    break
        if batch:
            ids = encode(batch)
            ids.tofile(file)
            count += len(ids)
    os.replace(partial, path)
    return _facts(path, {"kind": "tokens", "tokens": count, "used": used})


class Tokens:
    """Windows of a token file in a random order, another one each time round."""

    def __init__(self, path, batch, seq, seed):
        self.ids, self.batch, self.seq, self.seed = np.memmap(path, dtype=np.int32, mode="r"), batch, seq, seed
        self.windows = len(self.ids) // seq
        if self.windows < 1:
            raise ValueError(f"the text has {len(self.ids)} tokens, one sequence {seq}; give more --data or a smaller --seq")
        self.order = (None, None)

    def _window(self, i):
        round_, place = divmod(i, self.windows)
        if self.order[0] != round_:
            self.order = round_, np.random.default_rng([self.seed, round_]).permutation(self.windows)
        return self.order[1][place]

    def __call__(self, step):
        """int64 (batch, seq) of a step."""
        starts = [self._window(step * self.batch + i) * self.seq for i in range(self.batch)]
        return np.stack([self.ids[s : s + self.seq] for s in starts]).astype(np.int64)


class Synthetic:
    """A Markov source of order two, for machines without text; any length, nothing on disk.

    Tokens belong to one of 64 classes. The classes of the last two tokens choose one of 4096 rows of 32 candidates, of which the
    next token is one by Zipf's law; every tenth token is drawn by Zipf's law from the whole vocabulary. A model can learn the rows,
    and no more: the loss falls from log(vocabulary) to about :attr:`entropy`.
    """

    CLASSES, CANDIDATES, NOISE = 64, 32, 0.1

    def __init__(self, vocab, batch, seq, seed):
        self.vocab, self.batch, self.seq, self.seed = vocab, batch, seq, seed
        rng = np.random.default_rng([seed, 0])
        self.rank = rng.permutation(vocab)  # by frequency
        self.common = np.cumsum(1 / (np.arange(vocab) + 10.0))
        self.common /= self.common[-1]
        weights = 1 / (np.arange(self.CANDIDATES) + 1.0)
        weights /= weights.sum()
        self.choice = np.cumsum(weights)
        self.rows = self._common(rng.random((self.CLASSES**2, self.CANDIDATES)))
        noise = np.diff(self.common, prepend=0)
        noise = float(-(noise * np.log(noise)).sum())
        own = float(-(weights * np.log(weights)).sum())
        rest, mixing = self.NOISE, -self.NOISE * np.log(self.NOISE) - (1 - self.NOISE) * np.log(1 - self.NOISE)
        self.entropy = rest * noise + (1 - rest) * own + mixing  # where the two overlap it is less

    def _common(self, u):
        return self.rank[np.minimum(np.searchsorted(self.common, u), self.vocab - 1)]

    def __call__(self, step):
        rng = np.random.default_rng([self.seed, 1, step])
        out = np.empty((self.seq, self.batch), dtype=np.int64)
        noise = self._common(rng.random((self.seq, self.batch)))
        noisy = rng.random((self.seq, self.batch)) < self.NOISE
        noisy[:2] = True
        place = np.minimum(np.searchsorted(self.choice, rng.random((self.seq, self.batch))), self.CANDIDATES - 1)
        for t in range(self.seq):
            if t < 2:
                out[t] = noise[t]
            else:
                row = out[t - 2] % self.CLASSES * self.CLASSES + out[t - 1] % self.CLASSES
                out[t] = np.where(noisy[t], noise[t], self.rows[row, place[t]])
        return np.ascontiguousarray(out.T)


def source_of(config):
    """step -> batch, of a worker's configuration."""
    data, size = config["data"], (config["batch"], config["seq"], config["data_seed"])
    return Synthetic(config["model"]["vocab_size"], *size) if data["kind"] == "synthetic" else Tokens(data["path"], *size)
