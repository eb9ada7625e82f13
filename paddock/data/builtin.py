"""The task that comes with the package: two-digit addition, the sum written units digit first.

``12+34=`` is answered by ``64``. Carries run from the units up, so a small model can write the digits in the order in
which it computes them. A pair of numbers that is tested appears in no other split, in neither order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from paddock.config.paths import BUILTIN
from paddock.core.registry import suggest
from paddock.errors import UserError

ADDITION = "paddock/addition"
SEED = 1
TEST_PAIRS = 512
WARMUP_ROWS = 2048

Row = dict[str, Any]


def builtin_rows(name: str) -> list[Row]:
    """The rows that `builtin:addition/train`, `builtin:addition/test` or `builtin:addition/warmup` names."""
    build = SPLITS.get(name)
    if build is None:
        raise UserError("there is no such built-in data set", key=name, fix=suggest(name, sorted(SPLITS)))
    return build()


def train() -> list[Row]:
    return [_row(a, b, "train", index) for index, (a, b) in enumerate(_seen())]


def test() -> list[Row]:
    return [_row(a, b, "test", index) for index, (a, b) in enumerate(_held_out())]


def warmup() -> list[Row]:
    """A part of the training pairs with their answers, for supervised warm start."""
    pairs = sorted(_seen(), key=lambda pair: _rank("warmup", *pair))[:WARMUP_ROWS]
    return [_row(a, b, "warmup", index) | {"answer": reversed_sum(a, b)} for index, (a, b) in enumerate(pairs)]


def reversed_sum(a: int, b: int) -> str:
    return str(a + b)[::-1]


def _held_out() -> list[tuple[int, int]]:
    """Each tested pair once, in one of its two orders."""
    return [(a, b) if _rank("order", a, b)[0] % 2 else (b, a) for a, b in _pairs()[:TEST_PAIRS]]


def _seen() -> list[tuple[int, int]]:
    """The other pairs, in both orders."""
    return sorted({order for a, b in _pairs()[TEST_PAIRS:] for order in ((a, b), (b, a))})


def _pairs() -> list[tuple[int, int]]:
    """All a <= b of two digits, shuffled."""
    return sorted(
        ((a, b) for a in range(10, 100) for b in range(a, 100)),
        key=lambda pair: _rank("split", *pair),
    )


def _rank(use: str, a: int, b: int) -> bytes:
    """A fixed pseudo-random key: the same on every machine and Python."""
    return hashlib.blake2b(f"{use} {SEED} {a}+{b}".encode(), digest_size=16).digest()


def _row(a: int, b: int, split: str, index: int) -> Row:
    return {
        "data_source": ADDITION,
        "prompt": f"{a}+{b}=",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": reversed_sum(a, b)},
        "extra_info": {"split": split, "index": index},
    }


SPLITS: dict[str, Callable[[], list[Row]]] = {
    f"{BUILTIN}addition/{split.__name__}": split for split in (train, test, warmup)
}
