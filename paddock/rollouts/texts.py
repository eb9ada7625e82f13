"""Responses become texts by a table of the bytes of each token, where a token stands for the same bytes everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import decoders

from paddock.data.spelling import bytes_of
from paddock.rollouts.episode import Episode

Pieces = np.ndarray
"""The bytes of each token by its id, none for a special token; behind them none, for ids outside of the vocabulary."""


def backend_of(tokenizer: Any) -> Any | None:
    """Returns what decodes for the tokenizer, if its texts are the tokenizer's: nothing is cleaned up in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None or tokenizer.clean_up_tokenization_spaces else backend


def pieces_of(tokenizer: Any) -> Pieces | None:
    """Returns the table of a byte-level tokenizer; None for others, where a token's text may depend on the ones beside
    it.

    Joined and decoded, pieces are what `decode_batch` returns without special tokens, in a quarter of the time.
    """
    backend = backend_of(tokenizer)
    if backend is None or not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    size = 1 + max(backend.get_vocab().values(), default=-1)
    tokens = [backend.id_to_token(number) for number in range(size)]
    found = np.full(size + 1, b"", object)
    found[:size] = [b"" if token is None or token in special else bytes_of(token) for token in tokens]
    return found


def texts_of(pieces: Pieces, tokens: np.ndarray, lengths: np.ndarray) -> list[str]:
    """Returns the texts of responses of these lengths, whose tokens stand one after the other."""
    found, ends = pieces.take(tokens, mode="clip").tolist(), lengths.cumsum()
    spans = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    return [b"".join(found[start:end]).decode(errors="replace") for start, end in spans]


def texts_for_people(episodes: Sequence[Episode], decode: Callable[[list[list[int]]], list[str]]) -> list[str]:
    """Returns responses as texts, and conversations with all that was said in them."""
    if episodes and "conversation" in episodes[0].extras:
        return [conversation_text(episode.extras["conversation"]) for episode in episodes]
    return decode([[token for span in episode.spans for token in span.tokens] for episode in episodes])


def conversation_text(conversation: list[dict[str, Any]]) -> str:
    """Returns a conversation for people: what others than the policy said stands in brackets."""
    return "".join(
        turn["content"] if turn["role"] == "assistant" else f"\n[{turn['role']}: {turn['content']}]\n"
        for turn in conversation
    )
