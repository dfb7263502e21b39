"""What the examples train on: a small random model and a tokenizer of a few words, made on the spot, so that nothing is downloaded.

    python examples/tiny_data.py FOLDER     writes model, tokenizer and sentences.jsonl to FOLDER
"""

import json
import pathlib
import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SUBJECTS = "the cat|the old dog|a red bird|the small fish|a blue fox".split("|")
VERBS = "sees|hears|follows|likes".split("|")
SENTENCES = [f"{a} {verb} {b}" for a in SUBJECTS for verb in VERBS for b in SUBJECTS if a != b]


def tokenizer():
    """A tokenizer of whole words."""
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def model(seed=0):
    """A Llama of 0.6 million parameters with random weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def write(folder):
    """Writes model, tokenizer and sentences.jsonl to `folder`."""
    folder = pathlib.Path(folder)
    model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    (folder / "sentences.jsonl").write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES))


if __name__ == "__main__":
    write(sys.argv[1])
