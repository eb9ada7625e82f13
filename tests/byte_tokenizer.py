"""A real fast tokenizer that needs no files: one token a byte. Dressed for chat here, for tiny models beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if thinking %}<think>{% endif %}"
)
SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<think>")


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Roles are tokens of their own, behind the bytes; end-of-text is the padding."""
    return tokenizer_of_bytes(after=SPECIAL, template=template, eos_token=SPECIAL[0], pad_token=SPECIAL[0])


def tokenizer_of_bytes(
    before: Sequence[str] = (), after: Sequence[str] = (), template: str | None = None, **settings: Any
) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges, with special tokens before or behind the 256 bytes."""
    vocabulary = {token: number for number, token in enumerate([*before, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*before, *after])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **settings)
    tokenizer.chat_template = template
    return tokenizer
