"""Rows by their number among those of several tables, checked as they are read. Imports no torch: processes that
measure prompts start with it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddock.config.schema import DataConfig
from paddock.data.chat import Messages, PromptEncoder, messages_of, plain_text
from paddock.data.columns import EXTRA, MODEL, RULE
from paddock.data.tables import Record, Table, bad_row
from paddock.facts.files import TRUTH


@dataclass(frozen=True, slots=True)
class Asked:
    """A row with its prompt."""

    messages: Messages
    record: Record
    location: str
    folder: Path
    """The folder of the row's file, where its images are looked for."""


class Rows:
    """The rows of several tables, one after the other."""

    def __init__(self, tables: Sequence[Table], config: DataConfig, shows_images: bool):
        self.tables, self.config, self.shows_images = tables, config, shows_images
        self.starts = [0, *itertools.accumulate(table.count for table in tables)]

    def find(self, index: int) -> tuple[Table, int]:
        number = bisect.bisect_right(self.starts, index) - 1
        return self.tables[number], index - self.starts[number]

    def prompts(self, indices: Sequence[int]) -> list[Asked]:
        """Reads these rows, and checks their prompts."""
        config, found = self.config, list[Asked]()
        for number, group in itertools.groupby(indices, lambda index: bisect.bisect_right(self.starts, index) - 1):
            table, rows = self.tables[number], [index - self.starts[number] for index in group]
            folder = Path(table.path).expanduser().parent
            for row, record in zip(rows, table.rows(rows), strict=True):
                location = table.location(row)
                self._check(record, location)
                messages = messages_of(record.get(config.prompt_key), location, config.prompt_key)
                if not config.apply_chat_template:
                    messages = plain_text(messages, location, config.prompt_key)
                found.append(Asked(messages, record, location, folder))
        return found

    def _check(self, record: Record, location: str) -> None:
        for media, what in ((self.config.image_key, "images"), (self.config.video_key, "videos")):
            if record.get(media) and (what == "videos" or not self.shows_images):
                why = "which are not read" if what == "videos" else "and what is trained here reads none"
                raise bad_row(location, media, f"holds {what}, {why}", "remove the column")
        if not isinstance(extra := record.get(EXTRA), dict | None):
            raise bad_row(location, EXTRA, f"is {extra!r:.80}, not an object", "make it {...}, or leave it out")


@dataclass(frozen=True)
class PromptLengths:
    """Counts the tokens of prompts without images."""

    rows: Rows
    kept: np.ndarray
    encoder: PromptEncoder

    def __call__(self, positions: range) -> list[int]:
        indices = self.kept[positions.start : positions.stop].tolist()
        rows = self.rows.prompts(indices)
        messages, locations = [row.messages for row in rows], [row.location for row in rows]
        return [len(tokens) for tokens in self.encoder.encode(messages, locations, self.rows.config.prompt_key)]


@dataclass(frozen=True)
class Scorers:
    """Names the data source and the style of rows, and the first row that no scorer could be called for."""

    table: Table
    column: str

    def __call__(self, rows: range) -> list[tuple[str, str]]:
        scorers = []
        for row, record in zip(rows, self.table.rows(rows, (self.column, TRUTH)), strict=True):
            location = self.table.location(row)
            truth_of(record.get(TRUTH), location)
            scorers.append((source_of(record.get(self.column), location, self.column), style_of(record[TRUTH])))
        return scorers


def source_of(value: Any, location: str, column: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_row(
            location, column, f"is {value!r:.80}, not the name of a source", "name the source, e.g. openai/gsm8k"
        )
    return value


def style_of(value: dict[str, Any]) -> str:
    return MODEL if value.get("style") == MODEL else RULE


def truth_of(value: Any, location: str) -> Any:
    """`reward_model` is `{style: rule, ground_truth: ...}`, or `{style: model}` where a reward model scores."""
    if not isinstance(value, dict):
        raise bad_row(location, TRUTH, f"is {value!r:.80}", 'make it {"style": "rule", "ground_truth": "..."}')
    truth = value.get("ground_truth")
    if truth is None and value.get("style") != MODEL and not value.get("optional"):
        raise bad_row(
            location, TRUTH, "has no ground_truth", 'add one, or "style": "model" if a reward model scores the row'
        )
    return truth
