"""Tokenizers under verl's name."""

from __future__ import annotations

from typing import Any

from paddock.models.load import load_tokenizer


def hf_tokenizer(name_or_path: str, trust_remote_code: bool = False, **ignored: Any) -> Any:
    """Returns the tokenizer of a model; padding is right as `paddock` sets it."""
    return load_tokenizer(name_or_path, trust_remote_code, None)


def hf_processor(name_or_path: str, trust_remote_code: bool = False, **options: Any) -> Any:
    """Returns what reads images; None for a model that reads texts alone."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    found = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **options)
    return None if isinstance(found, PreTrainedTokenizerBase) else found
