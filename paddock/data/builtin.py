"""The tasks that come with the package: sums, products, and rows without a question.

Addition of two digits, the sum written units digit first: ``12+34=`` is answered by ``64``. Carries run from the units
up, so a small model can write the digits in the order in which it computes them. A pair of numbers that is tested
appears in no other split, in neither order. Products (``12*34=`` is answered by ``408``) are more than such a model
computes: it needs a tool. Episodes are for environments that ask by themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from paddock.config.paths import BUILTIN
from paddock.core.registry import suggest
from paddock.errors import UserError

ADDITION, PRODUCTS, EPISODES = "paddock/addition", "paddock/products", "paddock/episodes"
SEED = 1
TEST_PAIRS = 512
WARMUP_ROWS = 2048
TRAIN_EPISODES, TEST_EPISODES = 8192, 256
NEARBY = (-20, -11, -10, -9, -2, -1, 1, 2, 9, 10, 11, 20)

Row = dict[str, Any]


def builtin_rows(name: str) -> list[Row]:
    """Returns the rows that `builtin:addition/train` names, and so on: `SPLITS` has all names."""
    if name not in SPLITS:
        raise UserError("there is no such built-in data set", key=name, fix=suggest(name, sorted(SPLITS)))
    return SPLITS[name]()


@cache
def builtin_count(name: str) -> int:
    return len(builtin_rows(name))


def sums(split: str) -> list[Row]:
    return [_row(a, b, split, index) for index, (a, b) in enumerate(_numbers(split))]


def warmup() -> list[Row]:
    """Returns a part of the training pairs with their answers, for supervised warm start."""
    pairs = sorted(_seen(), key=lambda pair: _rank("warmup", *pair))[:WARMUP_ROWS]
    return [_row(a, b, "warmup", index) | {"answer": reversed_sum(a, b)} for index, (a, b) in enumerate(pairs)]


def pairs(split: str) -> list[Row]:
    """Returns a right and some wrong answers to each sum, for a reward model; `pairs_test` has sums that training never
    sees."""
    return [
        _row(a, b, split, index) | {"chosen": reversed_sum(a, b), "rejected": wrong}
        for index, (a, b) in enumerate(_numbers(split))
        for wrong in _wrong_answers(reversed_sum(a, b), a, b)
    ]


def reversed_sum(a: int, b: int) -> str:
    return str(a + b)[::-1]


def _wrong_answers(right: str, a: int, b: int) -> list[str]:
    """Mistakes of those who add: another units digit; another tens or hundreds digit, or a sum nearby; now and then the
    sum of other numbers, or a digit too few or too many, each as often: size alone tells nothing."""
    draw = _rank("wrong", a, b)
    place = 1 + draw[1] % (len(right) - 1)
    nearby = reversed_sum(a + NEARBY[draw[3] % len(NEARBY)], b)
    length = right[:-1] if draw[5] % 2 else right + str(draw[6] % 10)
    others = reversed_sum(10 + draw[7] % 90, 10 + draw[8] % 90)
    found = [_changed(right, 0, draw[0]), nearby if draw[4] % 2 else _changed(right, place, draw[2])]
    found += [length if draw[9] % 8 else others] if draw[9] % 4 == 0 else []
    return [wrong for wrong in found if wrong != right]


def _changed(right: str, place: int, draw: int) -> str:
    return right[:place] + str((int(right[place]) + 1 + draw % 9) % 10) + right[place + 1 :]


def _numbers(split: str) -> list[tuple[int, int]]:
    """Returns the pairs of a split. Each tested pair is there once, in one of its two orders."""
    if not split.endswith("test"):
        return _seen()
    return [(a, b) if _rank("order", a, b)[0] % 2 else (b, a) for a, b in _pairs()[:TEST_PAIRS]]


def _seen() -> list[tuple[int, int]]:
    """Returns the pairs of training, in both orders."""
    return sorted({order for a, b in _pairs()[TEST_PAIRS:] for order in ((a, b), (b, a))})


def _pairs() -> list[tuple[int, int]]:
    """All a <= b of two digits, shuffled."""
    pairs = ((a, b) for a in range(10, 100) for b in range(a, 100))
    return sorted(pairs, key=lambda pair: _rank("split", *pair))


def _rank(use: str, a: int, b: int) -> bytes:
    """Returns a fixed pseudo-random key: the same on every machine and Python."""
    return hashlib.blake2b(f"{use} {SEED} {a}+{b}".encode(), digest_size=16).digest()


def _row(a: int, b: int, split: str, index: int) -> Row:
    return {
        "data_source": ADDITION,
        "prompt": f"{a}+{b}=",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": reversed_sum(a, b)},
        "extra_info": {"split": split, "index": index},
    }


def products(split: str) -> list[Row]:
    """Returns questions for products of two numbers; those of `test` are asked nowhere else."""
    rows = []
    for row, (a, b) in zip(sums(split), _numbers(split), strict=True):
        truth = {"style": "rule", "ground_truth": str(a * b)}
        rows.append(row | {"data_source": PRODUCTS, "prompt": f"{a}*{b}=", "reward_model": truth})
    return rows


def product_turns() -> list[Row]:
    """Returns conversations for a supervised warm start: half of them call the tool, the others guess.

    A guess has the right number of digits and nothing else; one result in five that the tool gave is copied wrongly.
    """
    pairs = sorted(_seen(), key=lambda pair: _rank("turns", *pair))[:WARMUP_ROWS]
    return [{"messages": _turns(a, b)} for a, b in pairs]


def _turns(a: int, b: int) -> list[dict[str, str]]:
    draw, right = _rank("call", a, b), str(a * b)
    wrong = "".join(str(digit % 10) for digit in draw[2 : 2 + len(right)])
    question = {"role": "user", "content": f"{a}*{b}="}
    if draw[0] % 2:
        return [question, {"role": "assistant", "content": wrong}]
    return [
        question,
        {"role": "assistant", "content": f"[mul(a={a}, b={b})]"},
        {"role": "tool", "content": f"{right}="},
        {"role": "assistant", "content": wrong if draw[1] % 5 == 0 else right},
    ]


def episodes(split: str) -> list[Row]:
    """Returns rows that ask nothing: the environment does."""
    truth = {"style": "rule", "ground_truth": None, "optional": True}
    return [
        {"data_source": EPISODES, "prompt": " ", "reward_model": truth, "extra_info": {"split": split, "index": index}}
        for index in range(TRAIN_EPISODES if split == "train" else TEST_EPISODES)
    ]


SPLITS: dict[str, Callable[[], list[Row]]] = {
    **{f"{BUILTIN}addition/{split}": partial(sums, split) for split in ("train", "test")},
    f"{BUILTIN}addition/warmup": warmup,
    **{f"{BUILTIN}addition/{split}": partial(pairs, split) for split in ("pairs", "pairs_test")},
    **{f"{BUILTIN}products/{split}": partial(products, split) for split in ("train", "test")},
    f"{BUILTIN}products/turns": product_turns,
    **{f"{BUILTIN}episodes/{split}": partial(episodes, split) for split in ("train", "test")},
}
