"""Answers in words: what is dumped as jsonl, shown by loggers, and counted in validation."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from paddock.core.batch import Batch
from paddock.core.files import replacing
from paddock.core.masked import masked_mean

OWN_FIELDS = ("data_source", "ground_truth")
NOT_SHOWN = ("images", "written_prompt", "environment", "completion")
"""Columns that are no words, or have what `messages` and `conversation` have."""


@dataclass(frozen=True)
class Sample:
    """Holds one response of the policy in words, with its score.

    >>> import paddock
    >>> paddock.Sample(prompt="2+3=", answer="5", score=1.0, length=2, group=0).answer
    '5'
    """

    prompt: str
    answer: str
    """The response, decoded."""
    score: float
    """Score of the reward, before a KL penalty."""
    length: int
    """Tokens of the response that the policy wrote."""
    group: int
    """Equal for the answers to one prompt."""
    data_source: str = "unknown"
    ground_truth: Any = None
    advantage: float | None = None
    """Mean over its tokens."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What else the scorer returned (acc, pred, ...) and the row carried."""


def samples_of(batch: Batch, tokenizer: Any) -> list[Sample]:
    """Returns the batch's rows as text, without special tokens."""
    decode = partial(tokenizer.batch_decode, skip_special_tokens=True)
    prompts = [row[kept].tolist() for row, kept in zip(batch.prompts, batch.need("prompt_mask") != 0, strict=True)]
    advantages: Sequence[float | None] = [None] * len(batch)
    if batch.advantages is not None:
        advantages = masked_mean(batch.advantages, batch.need("mask"), -1).tolist()
    lengths = batch.policy_lengths().tolist()
    columns = zip(decode(prompts), decode(batch.answers()), batch.need("scores").sum(-1).tolist(), lengths,
                  batch.group.tolist(), advantages, strict=True)  # fmt: skip
    several = (batch.turn_counts() > 1).nonzero()[:, 0]
    turns = dict(zip(several.tolist(), map(decode, batch.rows(several).turns()), strict=True))
    return [
        Sample(prompt, answer, score, length, group, advantage=advantage, **extras_of(batch, i, turns.get(i)))
        for i, (prompt, answer, score, length, group, advantage) in enumerate(columns)
    ]


def extras_of(batch: Batch, row: int, turns: list[str] | None) -> dict[str, Any]:
    """Returns the arguments of a row's `Sample` that come from columns of the data. `turns`: the policy's texts, if an
    environment wrote in between."""
    extras = {name: values[row] for name, values in batch.extras.items() if name not in NOT_SHOWN}
    extras |= {"turns": turns} if turns else {}
    return {name: extras.pop(name) for name in OWN_FIELDS if name in extras} | {"extras": extras}


def dump_samples(folder: str | Path, step: int, samples: Sequence[Sample], key: str) -> Path:
    """Writes one line per sample to `<step>.jsonl`, which appears once it is whole; `key` is the setting that names
    it."""
    path = Path(folder) / f"{step}.jsonl"
    with replacing(path, key) as file:
        for sample in samples:
            record = {"step": step, **vars(sample), "extras": dict(sample.extras)}
            file.write(line_of(record))
    return path


def line_of(record: Mapping[str, Any]) -> bytes:
    """Returns a line of JSON, in which half a surrogate pair is a question mark."""
    return json.dumps(record, ensure_ascii=False, default=plain).encode(errors="replace") + b"\n"


def plain(value: Any) -> Any:
    """Returns arrays and tensors as lists, bytes (an image) in base64, anything else as its text."""
    if isinstance(value, bytes):
        return b64encode(value).decode()
    return value.tolist() if hasattr(value, "tolist") else str(value)
