"""What each token of a vocabulary stands for in a text, if that depends on the token alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import pre_tokenizers

from paddock.errors import UserError

FALLBACK = re.compile(r"<0x([0-9a-fA-F]{2})>")


@dataclass(frozen=True, eq=False)
class Spelling:
    """Holds what tokens stand for. A response's text is the bytes of its first token and those of the others, in order;
    special tokens are written out."""

    pieces: list[bytes | None]
    """The bytes of each token by its id; None for an id that no token has."""
    first: list[bytes | None]
    """The same for a token that begins a text: some tokenizers leave its space out."""
    fallback: dict[int, int]
    """Byte by id, of tokens that stand for one byte beside tokens of text: bytes in a row that are no UTF-8 are as many
    replacement characters. Empty for byte-level tokenizers, where only those that are no UTF-8 are replaced."""


def spelling_of(tokenizer: Any) -> Spelling:
    """Returns the spelling of a tokenizer of the tokenizers library; refuses others, and those whose decoder writes a
    token by the ones beside it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise unknown("is none of the tokenizers library")
    names = [backend.id_to_token(number) for number in range(1 + max(backend.get_vocab().values(), default=-1))]
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    spell, spell_first, falls_back = decoded_by(decoder)
    pieces = [None if name is None else spell(name) for name in names]
    first = [None if name is None else spell_first(name) for name in names]
    if not falls_back:
        return Spelling(pieces, first, {})
    matches = ((number, FALLBACK.fullmatch(name)) for number, name in enumerate(names) if name is not None)
    found = {number: int(match[1], 16) for number, match in matches if match}
    for number, byte in found.items():
        pieces[number] = bytes([byte])
        first[number] = b"" if spell_first(chr(byte)) == b"" else bytes([byte])
    return Spelling(pieces, first, found)


def decoded_by(decoder: Any) -> tuple[Callable[[str], bytes], Callable[[str], bytes], bool]:
    """Returns how a decoder, as tokenizer.json describes it, writes a token, how it writes a first one, and whether
    tokens such as <0x0A> are bytes."""
    if decoder is None:  # tokens have spaces between them
        return (lambda name: f" {name}".encode()), str.encode, False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return bytes_of, bytes_of, False
    if kinds == ["Metaspace"]:
        mark, strips = steps[0]["replacement"], steps[0].get("prepend_scheme") != "never"
        return (
            (lambda name: name.replace(mark, " ").encode()),
            (lambda name: name.replace(mark, "" if strips else " ").encode()),
            False,
        )
    replaced: list[tuple[str, str]] = []
    stripped = ""
    for at, step in enumerate(steps):
        if step["type"] == "Replace" and "String" in step["pattern"] and "Fuse" not in kinds[:at]:
            replaced.append((step["pattern"]["String"], step["content"]))
        elif step["type"] == "Strip" and "Fuse" in kinds[:at] and (step["start"], step["stop"]) == (1, 0):
            stripped = step["content"]
        elif step["type"] not in ("ByteFallback", "Fuse"):
            raise unknown(f"has a decoder ({', '.join(kinds)}) that writes a token by those beside it")

    def spell(name: str) -> bytes:
        for old, new in replaced:
            name = name.replace(old, new)
        return name.encode()

    return spell, (lambda name: spell(name).removeprefix(stripped.encode())), "ByteFallback" in kinds


def unknown(reason: str) -> UserError:
    fix = "leave it out, or let a reward function or an environment read the end of the text"
    return UserError(f"cannot be found: the tokenizer {reason}", key="actor_rollout_ref.rollout.stop", fix=fix)


def bytes_of(token: str) -> bytes:
    """Returns the bytes that a byte-level token is written for; the text's own if not all of it is written that way, as
    in tokens that were added."""
    try:
        return token.translate(WRITTEN).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def written() -> dict[int, int]:
    """Returns, for `translate`, the byte that each character of byte-level tokens stands for. A byte that is a visible
    character is written as that one, the others as characters from 256 on, in order; they stand for no byte themselves.
    """
    alphabet = {ord(character) for character in pre_tokenizers.ByteLevel.alphabet()}
    hidden = [byte for byte in range(256) if byte not in alphabet]
    return {256 + number: byte for number, byte in enumerate(hidden)} | dict.fromkeys(hidden, 256)


WRITTEN = written()
