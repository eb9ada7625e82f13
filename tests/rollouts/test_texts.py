"""Texts by a table of bytes are those of the tokenizer's own code, whatever the tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from byte_tokenizer import byte_tokenizer, tokenizer_of_bytes
from holes import TOKENIZER, episodes, holes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paddock.loading.load import load
from paddock.rollouts.batch import in_a_row
from paddock.rollouts.collect import Collector
from paddock.rollouts.texts import pieces_of
from paddock.trainer.assembly import open_rewards


def collector_of(tokenizer, rewards=None) -> Collector:
    return Collector(load([]).config, None, None, rewards, tokenizer, frozenset())  # type: ignore[arg-type]


def tokenizer_with_everything() -> PreTrainedTokenizerFast:
    """Returns one with words of several bytes, parts of characters, characters that stand for no byte, ids without a
    token, and added tokens, special and not."""
    words = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "\u0120the",
        "\u00e2\u0124",
        "\u00e2\u0124\u00ac",
        "\u010a\u010a",
    ]
    words += ["a b", "\u2581low", "<unk>", "ab\u00ad", "\u00a0", "tab\t", "\U0001f600"]
    vocabulary = {word: 3 * number for number, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", AddedToken("<unk>", special=True), AddedToken("\u0120s", special=True)])
    backend.add_tokens(
        ["<think>", "caf\u00e9", "\u0120\u0120", AddedToken(" x\n", normalized=False), "\u65e5\u672c", "\u00ad"]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    "tokenizer",
    [tokenizer_with_everything(), byte_tokenizer(), tokenizer_of_bytes(before=["<pad>", "<s>"])],
    ids=["everything", "bytes", "special first"],
)
def test_texts_by_the_table_are_those_of_the_tokenizers_library(tokenizer):
    draw, backend = random.Random(0), tokenizer.backend_tokenizer
    size = 1 + max(backend.get_vocab().values())
    rows = [[number] for number in range(size + 3)]
    rows += [[draw.randrange(size + 3) for _ in range(draw.randrange(40))] for _ in range(5_000)]
    texts = collector_of(tokenizer).decode(rows)
    assert pieces_of(tokenizer) is not None and texts == backend.decode_batch(rows, skip_special_tokens=True)
    assert {"", "\ufffd"} <= {*texts[:size]}, "special tokens, and bytes that are no text by themselves"


def test_all_pairs_of_bytes_and_truncated_characters_are_read_as_the_tokenizers_library_reads_them():
    tokenizer, draw = tokenizer_of_bytes(), random.Random(1)
    numbers = [piece[0] for piece in pieces_of(tokenizer)[:256]]
    at = {byte: number for number, byte in enumerate(numbers)}
    starts = [
        0x41,
        0x80,
        0xBF,
        0xC0,
        0xC2,
        0xDF,
        0xE0,
        0xE2,
        0xED,
        0xEF,
        0xF0,
        0xF1,
        0xF4,
        0xF5,
        0xFF,
        0x8F,
        0x90,
        0x9F,
        0xA0,
    ]
    rows = [[a, b] for a in range(256) for b in range(256)]
    rows += [[at[draw.choice(starts)] for _ in range(draw.randrange(3, 9))] for _ in range(50_000)]
    assert collector_of(tokenizer).decode(rows) == tokenizer.backend_tokenizer.decode_batch(rows)


def test_other_tokenizers_decode_by_themselves():
    tokenizer = tokenizer_of_bytes()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    assert pieces_of(tokenizer) is None
    rows = [tokenizer.backend_tokenizer.encode("  a b").ids, []]
    assert collector_of(tokenizer).decode(rows) == [" a b", ""]
    cleaning = tokenizer_of_bytes()
    cleaning.clean_up_tokenization_spaces = True
    assert pieces_of(cleaning) is None and pieces_of(object()) is None


@pytest.mark.parametrize("by_table", [True, False])
def test_texts_of_a_batch_end_with_the_response_and_not_with_padding(by_table):
    collector, batch = collector_of(TOKENIZER), holes()
    if not by_table:
        collector.pieces = None
    zeros = batch.with_(responses=torch.where(torch.arange(7) < batch.lengths[:, None], batch.responses, 0))
    assert TOKENIZER.decode([0]) != "", "padding may be any token"
    assert collector.decode(batch.answers()) == collector.decode(zeros.answers()) == ["ab#4c4", "de", "fghij", ""]


def test_tokens_go_to_scorers_that_may_read_them_alone(tmp_path):
    (tmp_path / "reward.py").write_text(
        "def ours(data_source, solution_str, ground_truth, extra_info):\n    return 0.0\n"
        "def columns(prompts, completions, completion_ids, **columns):\n    return [0.0] * len(prompts)\n"
    )
    for name, reads in (("ours", False), ("columns", True)):
        path = [f"custom_reward_function.path={tmp_path / 'reward.py'}", f"custom_reward_function.name={name}"]
        with open_rewards(load(path).config) as rewards:
            assert rewards.reads_tokens is reads
            asked = collector_of(TOKENIZER, rewards).requests(dict(enumerate(episodes())))
        own = [[token for span in one.response for token in span.tokens] for one in episodes()]
        assert [list(request.tokens) for request in asked.values()] == (own if reads else [[]] * 4)


def test_numbers_in_a_row_are_rounded_as_numpy_rounds_them():
    draw = np.random.default_rng(0)
    lists = [(-(draw.exponential(size=size) ** 9)).tolist() for size in (0, 1, 700, 0, 3)] + [
        [float("-inf"), 1e300, -0.0]
    ]
    with np.errstate(over="ignore"):
        wanted = np.fromiter((value for one in lists for value in one), np.float32)
    assert in_a_row(lists, np.float32).tobytes() == wanted.tobytes()
    assert in_a_row([[1, 2**62], [], [3]], np.int64).tolist() == [1, 2**62, 3] and len(in_a_row([], np.int64)) == 0
