"""Prompts to train on or to validate with: rows of data files, checked when opened, tokenised when asked for."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddock.config.schema import DataConfig
from paddock.core.images import Images
from paddock.core.rng import permutation
from paddock.data.chat import Messages, PromptEncoder, messages_of, truncated
from paddock.data.images import Asked, ImagePrompts, ImageReader
from paddock.data.lengths import prompt_lengths
from paddock.data.plugins import tables_of
from paddock.data.tables import Record, Table, bad_row
from paddock.errors import UserError

log = logging.getLogger(__name__)

TRUTH = "reward_model"
EXTRA = "extra_info"
RULE, MODEL, BOTH = "rule", "model", "both"


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt, ready to be answered."""

    index: int
    """Its place among all rows of all files, those left out included."""
    group: int
    """Id of this draw of the prompt: `index` in the first epoch, then as many ids further on as there are rows."""
    tokens: list[int]
    messages: Messages
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    place: str
    """File and row, for messages to people."""
    style: str = RULE
    """Who scores its answers: a rule, a reward model, or both."""
    images: Images | None = None
    """What the model sees beside the tokens."""


class PromptDataset:
    """The rows of one or several files, one after the other. Keeps Arrow tables or JSON lines, never Python rows."""

    def __init__(
        self, files: Any, tokenizer: Any, config: DataConfig, *, key: str, most: int = -1, shuffle: bool = False,
        reader: ImageReader | None = None,
    ):  # fmt: skip
        """`most` rows are used, if positive: the first ones, or with `shuffle` any, by `data.seed`."""
        self.config, self.key = config, key
        self.encoder = PromptEncoder(tokenizer, config.apply_chat_template_kwargs)
        self.prompts = ImagePrompts(self.encoder, reader, config.prompt_key, config.image_key)
        wanted = [config.prompt_key, config.reward_fn_key, TRUTH, EXTRA, config.image_key, config.video_key]
        self.tables = tables_of(files, tokenizer, config, key, lambda path: wanted)
        self.starts = [0, *itertools.accumulate(table.count for table in self.tables)]
        self.row_styles: list[str] = []
        """Who scores each row, as the files have it."""
        self.scored_by = {MODEL: RULE}
        """The style that rows of a style get in this run, where it is another: without a model, rules score all."""
        self.row_sources = self._check()
        self._content = b"".join(table.digest() for table in self.tables)
        self.kept = self._choose(most, shuffle)
        self.left_out = 0
        if config.filter_overlong_prompts:
            self._leave_out_overlong()

    @classmethod
    def train(cls, config: DataConfig, tokenizer: Any, reader: ImageReader | None = None) -> PromptDataset:
        most, shuffle = config.train_max_samples, config.shuffle
        return cls(config.train_files, tokenizer, config, key="data.train_files", most=most, shuffle=shuffle,
                   reader=reader)  # fmt: skip

    @classmethod
    def validation(cls, config: DataConfig, tokenizer: Any, reader: ImageReader | None = None) -> PromptDataset:
        most, shuffle = config.val_max_samples, config.validation_shuffle
        return cls(config.val_files, tokenizer, config, key="data.val_files", most=most, shuffle=shuffle,
                   reader=reader)  # fmt: skip

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, position: int) -> PromptRow:
        return self.rows([position])[0]

    @property
    def total(self) -> int:
        """Rows of all files, those left out included: indices are below it."""
        return self.starts[-1]

    def rows(self, positions: Sequence[int]) -> list[PromptRow]:
        """The rows at these positions among those that are used, tokenised together."""
        return self._rows([int(self.kept[position]) for position in positions])

    @property
    def sources(self) -> dict[str, int]:
        """How many rows each data source gives."""
        return dict(Counter(self.row_sources[index] for index in self.kept))

    @property
    def shows_images(self) -> bool:
        return self.prompts.reader is not None and any(self.config.image_key in table.columns for table in self.tables)

    def one_of_each_source(self) -> list[PromptRow]:
        """The first row of every data source and style, to try a scorer on before training starts."""
        first: dict[tuple[str, str], int] = {}
        for index in self.kept.tolist():
            first.setdefault((self.row_sources[index], self.row_styles[index]), index)
        return self._rows(list(first.values()))

    @property
    def identity(self) -> str:
        """Equal for equal files, in the same order, of which the same rows are used."""
        return hashlib.sha256(self._content + self.kept.astype("<i8").tobytes()).hexdigest()

    def _check(self) -> list[str]:
        """Names the first row that no scorer could be called for; returns the source of every row."""
        if not self.tables:
            raise UserError("no data file is named", key=self.key, fix=f"{self.key}=train.parquet")
        source, sources = self.config.reward_fn_key, list[str]()
        for table in self.tables:
            if not table.count:
                raise UserError("holds no rows", key=self.key, value=table.path, fix="write it again, or leave it out")
            for column in (self.config.prompt_key, source, TRUTH):
                if column not in table.columns:
                    raise self._missing(table, column)
            for row, record in enumerate(table.records((source, TRUTH))):
                sources.append(sys.intern(_source(record[source], table.place(row), source)))
                _truth(record[TRUTH], table.place(row))
                self.row_styles.append(_style(record[TRUTH]))
        return sources

    def _missing(self, table: Table, column: str) -> UserError:
        setting = {self.config.prompt_key: "data.prompt_key", self.config.reward_fn_key: "data.reward_fn_key"}.get(
            column
        )
        return UserError(
            f"{table.path} has no column {column!r}; it has {', '.join(map(repr, table.columns)) or 'none'}",
            key=self.key,
            fix=f"name the right one: {setting}=..." if setting else 'add it: {"style": "rule", "ground_truth": "..."}',
        )

    def _choose(self, most: int, shuffle: bool) -> np.ndarray:
        if not 0 < most < self.total:
            return np.arange(self.total)
        return np.sort(permutation(self.total, self.config.seed or 0, 0)[:most].numpy()) if shuffle else np.arange(most)

    def _leave_out_overlong(self) -> None:
        longest, column = self.config.max_prompt_length, self.config.prompt_key

        def measure(positions: range) -> list[int]:
            return self.prompts.lengths(self._asked([int(self.kept[position]) for position in positions]))

        known, identity = self.prompts.identity(), None
        if known:
            identity = hashlib.sha256(known + self.identity.encode() + column.encode()).digest()
        lengths = prompt_lengths(len(self), measure, self.config.filter_overlong_prompts_workers, identity)
        fits = lengths <= longest
        if not fits.any():
            reason = f"every prompt of {self.key} is longer: the shortest has {lengths.min()} tokens"
            raise UserError(reason, key="data.max_prompt_length", value=longest, fix="raise it")
        self.left_out = int((~fits).sum())
        if self.left_out:
            log.warning("%s: %d of %d prompts have more than data.max_prompt_length=%d tokens and are left out",
                        self.key, self.left_out, len(lengths), longest)  # fmt: skip
        self.kept = self.kept[fits]

    def _rows(self, indices: list[int]) -> list[PromptRow]:
        config = self.config
        rows = self._asked(indices)
        return [
            PromptRow(
                index=index,
                group=index,
                tokens=self._shortened(tokens, images, row.place),
                messages=row.messages,
                data_source=_source(row.record[config.reward_fn_key], row.place, config.reward_fn_key),
                ground_truth=_truth(row.record[TRUTH], row.place),
                extra_info=row.record.get(EXTRA) or {},
                place=row.place,
                style=self.scored_by.get(style := _style(row.record[TRUTH]), style),
                images=images,
            )
            for index, row, (tokens, images) in zip(indices, rows, self.prompts.encode(rows), strict=True)
        ]

    def _shortened(self, tokens: list[int], images: Images | None, place: str) -> list[int]:
        """An image is never cut: its features would find no tokens."""
        how = self.config.truncation if images is None else "error"
        return truncated(tokens, self.config.max_prompt_length, how, place)

    def _asked(self, indices: list[int]) -> list[Asked]:
        places, messages, records = self._prompts(indices)
        folders = [Path(self._find(index)[0].path).expanduser().parent for index in indices]
        return [Asked(*row) for row in zip(messages, records, places, folders, strict=True)]

    def _prompts(self, indices: list[int]) -> tuple[list[str], list[Messages], list[Record]]:
        """Where each row stands, what it asks, and all it holds."""
        found = [self._find(index) for index in indices]
        places = [table.place(row) for table, row in found]
        records = [table.row(row) for table, row in found]
        column = self.config.prompt_key
        for place, record in zip(places, records, strict=True):
            for media, what in ((self.config.image_key, "images"), (self.config.video_key, "videos")):
                if record.get(media) and (what == "videos" or self.prompts.reader is None):
                    why = "which are not read" if what == "videos" else "and what is trained here reads none"
                    raise bad_row(place, media, f"holds {what}, {why}", "remove the column")
            if not isinstance(extra := record.get(EXTRA), dict | None):
                raise bad_row(place, EXTRA, f"is {extra!r:.80}, not an object", "make it {...}, or leave it out")
        messages = [
            messages_of(record.get(column), place, column) for place, record in zip(places, records, strict=True)
        ]
        return places, messages, records

    def _find(self, index: int) -> tuple[Table, int]:
        number = bisect.bisect_right(self.starts, index) - 1
        return self.tables[number], index - self.starts[number]


def _source(value: Any, place: str, column: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_row(
            place, column, f"is {value!r:.80}, not the name of a source", "name the source, e.g. openai/gsm8k"
        )
    return value


def _style(value: dict[str, Any]) -> str:
    return MODEL if value.get("style") == MODEL else RULE


def _truth(value: Any, place: str) -> Any:
    """`reward_model` is `{style: rule, ground_truth: ...}`, or `{style: model}` where a reward model scores."""
    if not isinstance(value, dict):
        raise bad_row(place, TRUTH, f"is {value!r:.80}", 'make it {"style": "rule", "ground_truth": "..."}')
    truth = value.get("ground_truth")
    if truth is None and value.get("style") != "model":
        raise bad_row(
            place, TRUTH, "has no ground_truth", 'add one, or "style": "model" if a reward model scores the row'
        )
    return truth
