"""A tokenizer of few letters for tiny models: strings of two or three letters come up every few tokens."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "ab<>\n\u00e9"


def letter_tokenizer(size: int = 264) -> PreTrainedTokenizerFast:
    """Returns one whose first four tokens are special, as those of `tiny_models`; others are bytes, parts of characters
    among them."""
    chance = random.Random(3)
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = dict.fromkeys(["<pad>", "<eos>", "<bos>", "<unk>"])
    while len(names) < size:
        text = "".join(chance.choices(LETTERS, k=chance.randint(1, 6)))
        written = "".join(piece for piece, _ in encoder.pre_tokenize_str(text))
        start = chance.randrange(len(written))
        names[written[start : start + 4]] = None
    backend = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = encoder, decoders.ByteLevel()
    backend.add_special_tokens(list(names)[:4])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>",
                                   clean_up_tokenization_spaces=False)  # fmt: skip
