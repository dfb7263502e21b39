"""Training text that every machine has: the sources of Python's standard library, and a byte-level BPE trained on them."""

import pathlib
import sysconfig

MEGABYTES = 12
SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo"}


def corpus(megabytes=MEGABYTES):
    """Source texts, in a fixed order, up to that many megabytes."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts, left = [], megabytes * 1_000_000
    for path in sorted(root.rglob("*.py")):
        if SKIP.intersection(path.relative_to(root).parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        texts.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    return texts


def tokenize(vocab, wanted):
    """(int32 tensor of at least `wanted` tokens, vocabulary actually used). The BPE may find fewer merges than asked for."""
    import tokenizers
    import torch

    texts = corpus(max(1, min(MEGABYTES, vocab // 1000)))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab, show_progress=False, special_tokens=["<eos>"],
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    ids = []
    while len(ids) < wanted:  # a small corpus is read again
        for start in range(0, len(texts), 16):
            for encoded in tokenizer.encode_batch(texts[start : start + 16]):
                ids += encoded.ids + [0]
            if len(ids) >= wanted:
                break
    return torch.tensor(ids, dtype=torch.int32), tokenizer.get_vocab_size()
