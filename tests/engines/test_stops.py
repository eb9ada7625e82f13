"""A table of stop strings ends at the token with which the decoded text has one of them for the first time."""

from __future__ import annotations

import random
from itertools import takewhile

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paddock.data.spelling import WRITTEN, spelling_of
from paddock.engines.rollout.stops import KEY, MOST_BYTES, StopTable, StopTables
from paddock.errors import UserError

CPU = torch.device("cpu")
LETTERS = "ab <>\n\u00e9\u20ac\u65e5\U0001f600"
MARK = "\u2581"
PIECES = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=12, unique=True)
CHANCES = st.randoms(use_true_random=False)
PARTS = st.lists(st.binary(min_size=1, max_size=4), max_size=6)
STRINGS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=3)
SPECIAL = ("<s>", "<ab>")
SENTENCEPIECE = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "llama": decoders.Sequence([*SENTENCEPIECE, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(SENTENCEPIECE),
    "metaspace": decoders.Metaspace(),
    "none": None,
}


def tokenizer_of(names: list[str], decoder) -> PreTrainedTokenizerFast:
    """Returns one with these tokens at every second id, two special ones and an added one."""
    backend = Tokenizer(models.BPE(vocab={name: 2 * at for at, name in enumerate(dict.fromkeys(names))}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken("a>\n", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def byte_level(pieces: list[bytes]) -> PreTrainedTokenizerFast:
    names = {byte: chr(character) for character, byte in WRITTEN.items() if byte < 256}
    alphabet = {ord(character): character for character in pre_tokenizers.ByteLevel.alphabet()}
    written = ["".join(names.get(byte) or alphabet[byte] for byte in piece) for piece in pieces]
    return tokenizer_of([*sorted(pre_tokenizers.ByteLevel.alphabet()), *written], decoders.ByteLevel())


def plain_end(tokenizer, tokens: list[int], strings: list[str], minimum: int) -> int | None:
    """Decodes the whole text after every token: which is the first whose own text is part of a string?"""
    before = ""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=False)
        pairs = zip(before, text, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if count > minimum and any(text.find(one, max(0, same - len(one) + 1)) >= 0 for one in strings):
            return count
        before = text
    return None


def agrees(tokenizer, chance: random.Random, strings: list[str], minimum: int) -> None:
    """Draws tokens, most of them part of a string or with one in them."""
    spelling, wanted = spelling_of(tokenizer), [string.encode() for string in strings]
    near = [number for number, piece in enumerate(spelling.pieces)
            if piece and any(piece.strip() in one or one in piece for one in wanted)]  # fmt: skip
    others = range(len(spelling.pieces) + 2)
    tokens = [chance.choice(near if near and chance.random() < 0.9 else others) for _ in range(30)]
    table = StopTables(tokenizer).of(tuple(strings), CPU)
    assert table is not None
    expected = plain_end(tokenizer, tokens, strings, minimum)
    assert table.read(tokens, table.start, minimum)[1] == expected == stepped(table, tokens, minimum)
    event("ended" if expected else "went on")


def stepped(table: StopTable, tokens: list[int], minimum: int) -> int | None:
    states = torch.tensor([table.start])
    for count, token in enumerate(tokens, 1):
        states, ended = table.step(states, torch.tensor([token]))
        assert states.tolist() == [table.after(tokens[:count])]
        if ended and count > minimum:
            return count
    return None


@settings(max_examples=150, deadline=None)
@given(PIECES, PARTS, STRINGS, CHANCES, st.integers(0, 6))
def test_tokens_of_bytes_end_where_the_decoded_text_has_a_string(texts, parts, strings, chance, minimum):
    agrees(byte_level([*(text.encode() for text in texts), *parts]), chance, strings, minimum)


@pytest.mark.parametrize("decoder", DECODERS)
@settings(max_examples=150, deadline=None)
@given(PIECES, STRINGS, CHANCES, st.integers(0, 6))
def test_tokens_of_text_with_bytes_beside_them_end_where_the_decoded_text_has_a_string(
    decoder, texts, strings, chance, minimum
):
    used = sorted({byte for letter in LETTERS for byte in letter.encode()} | {0x80, 0xED, 0xFF})
    names = [text.replace(" ", MARK) for text in texts] + [f"<0x{byte:02X}>" for byte in used] + [MARK]
    agrees(tokenizer_of(names, DECODERS[decoder]), chance, strings, minimum)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), decoders.Sequence([
    decoders.Fuse(), decoders.Replace(MARK, " ")])], ids=["WordPiece", "BPEDecoder", "Sequence"])  # fmt: skip
def test_a_decoder_that_writes_a_token_by_its_neighbours_is_refused_by_name(decoder):
    with pytest.raises(UserError) as caught:
        StopTables(tokenizer_of(["a", "b"], decoder)).of(("ab",), CPU)
    assert caught.value.key == KEY and "decoder" in caught.value.reason and caught.value.fix


def test_strings_of_more_bytes_than_a_table_has_room_for_are_refused():
    tokenizer = byte_level([])
    assert StopTables(tokenizer).of(("x" * MOST_BYTES,), CPU)
    with pytest.raises(UserError, match=f"{MOST_BYTES + 1} bytes"):
        StopTables(tokenizer).of(("x" * MOST_BYTES, "y"), CPU)
