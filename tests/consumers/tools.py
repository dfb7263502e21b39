"""What the tests of several consumers share."""

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = "the a cat dog bird fish sees hears follows likes red blue small old and but then never always today".split()
CHAT = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s>{% endfor %}"


def tokenizer():
    """A tokenizer of a few words; id 0 pads, 1 begins, 2 ends."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", *WORDS])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                   chat_template=CHAT)


def sentences(count=24):
    """Sentences of different lengths."""
    return [" ".join(WORDS[(7 * i + 3 * j * j) % len(WORDS)] for j in range(5 + i % 9)) for i in range(count)]


def texts(count=24):
    return datasets.Dataset.from_dict({"text": sentences(count)})
