"""Prompts to train on or to validate with: rows of data files, checked when opened, tokenised when asked for."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddock.config.schema import DataConfig
from paddock.core.images import Images
from paddock.core.rng import permutation
from paddock.data.chat import Messages, PromptEncoder, truncated
from paddock.data.columns import AGENT, ENVIRONMENT, EXTRA, MODEL, RULE, WRITTEN, scored, wanted_columns
from paddock.data.images import ImagePrompts, ReadsImages
from paddock.data.kept import Arrays, kept_arrays
from paddock.data.plugins import tables_of
from paddock.data.processes import MANY, over_ranges, same_processes
from paddock.data.reading import PromptLengths, Rows, Scorers, source_of, style_of, truth_of
from paddock.data.tables import Table
from paddock.errors import UserError
from paddock.facts.files import TRUTH

log = logging.getLogger(__name__)

BOTH = "both"
LOOKED_AT = 1000
"""Rows of each file that are compared with each other."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt, ready to be answered."""

    index: int
    """The row's number among all rows of all files, those left out included."""
    group: int
    """Id of this draw of the prompt: `index` in the first epoch, then as many ids further on as there are rows."""
    tokens: list[int]
    messages: Messages
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    location: str
    """File and row, for messages to people."""
    style: str = RULE
    """Names the scorer of its answers: a rule, a reward model, or both."""
    images: Images | None = None
    """The images of the prompt, as the model sees them."""
    written_prompt: Messages | None = None
    """The prompt as the data has it: a plain text, also if `messages` asks it as a message of the user's."""
    agent: str | None = None
    """Names the agent loop that answers it, in a column `agent_name`."""
    environment: Any = None
    """Names its environment, in a column `environment`, if the run has several."""


Styles = Callable[[Collection[str]], dict[str, str]]
"""Is given the styles that rows name, and returns the style that scores them in this run, where it is another."""


def without_a_model(styles: Collection[str]) -> dict[str, str]:
    """Without a reward model, rules score all rows."""
    return {MODEL: RULE}


class PromptDataset:
    """The rows of one or several files, one after the other. Rows stay on disk, or packed in memory."""

    def __init__(
        self, files: Any, tokenizer: Any, config: DataConfig, *, key: str, most: int = -1, shuffle: bool = False,
        reader: ReadsImages | None = None, styles: Styles = without_a_model,
    ):  # fmt: skip
        """`most` rows are used, if positive: the first ones, or with `shuffle` any, by `data.seed`."""
        self.config, self.key = config, key
        self.encoder = PromptEncoder(tokenizer, config.apply_chat_template_kwargs)
        self.prompts = ImagePrompts(self.encoder, reader, config.prompt_key, config.image_key)
        with same_processes():
            self._arrange(tables_of(files, tokenizer, config, key, self._wanted))
            self._check()
            self.scorers, self.codes = self._scorers()
            """The data sources and styles of rows, and for each row the number of its own."""
            self.scored_by = styles({style for _, style in self.scorers})
            self._content = b"".join(table.digest() for table in self.tables)
            count = most if 0 < most < self.total else self.total
            chosen = permutation(self.total, config.seed or 0, 0)[:count] if shuffle and count < self.total else None
            self.kept = np.arange(count) if chosen is None else np.sort(chosen.numpy())
            self.left_out = 0
            if config.filter_overlong_prompts:
                self._leave_out_overlong()

    def _wanted(self, columns: list[str]) -> Sequence[str]:
        """Returns the columns of a file that are read."""
        return wanted_columns(columns, self.config)

    def _adapted(self, table: Table) -> Table:
        """Returns the table with the columns that are needed here, made of those that it has."""
        templated = self.encoder.tokenizer.chat_template is not None and self.config.apply_chat_template
        return table if self.config.custom_cls.path else scored(table, self.config, templated, self.key)

    def _arrange(self, opened: list[list[Table]]) -> None:
        """`opened` has the tables of each entry of the key."""
        self.tables = [self._adapted(table) for tables in opened for table in tables]
        self.reading = Rows(self.tables, self.config, self.prompts.reader is not None)
        self.entries = [0, *itertools.accumulate(sum(table.count for table in tables) for tables in opened)]
        """Index of the first row of each entry, and of the end of the last one."""

    @classmethod
    def train(
        cls, config: DataConfig, tokenizer: Any, reader: ReadsImages | None = None, styles: Styles = without_a_model
    ) -> PromptDataset:
        dataset = cls(config.train_files, tokenizer, config, key="data.train_files", most=config.train_max_samples,
                      shuffle=config.shuffle, reader=reader, styles=styles)  # fmt: skip
        dataset._tell_of_equal_rows()
        return dataset

    @classmethod
    def validation(
        cls, config: DataConfig, tokenizer: Any, reader: ReadsImages | None = None, styles: Styles = without_a_model
    ) -> PromptDataset:
        return cls(config.val_files, tokenizer, config, key="data.val_files", most=config.val_max_samples,
                   shuffle=config.validation_shuffle, reader=reader, styles=styles)  # fmt: skip

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, position: int) -> PromptRow:
        return self.rows([position])[0]

    @property
    def total(self) -> int:
        """Rows of all files, those left out included: indices are below it."""
        return self.reading.starts[-1]

    @property
    def rows_of_entries(self) -> list[int]:
        """Returns how many used rows each entry of the key gives."""
        return np.diff(np.searchsorted(self.kept, self.entries)).tolist()

    def rows(self, positions: Sequence[int]) -> list[PromptRow]:
        """Returns the rows at these positions among those that are used, tokenised together."""
        return self._rows([int(self.kept[position]) for position in positions])

    @property
    def sources(self) -> dict[str, int]:
        """Returns how many rows each data source gives."""
        counts = np.bincount(self.codes[self.kept], minlength=len(self.scorers)).tolist()
        rows = Counter[str]()
        for (source, _), count in zip(self.scorers, counts, strict=True):
            rows[source] += count
        return {source: count for source, count in rows.items() if count}

    @property
    def names_agents(self) -> bool:
        """True if rows may have agent loops of their own."""
        return any(AGENT in table.columns for table in self.tables)

    def first_of_each(self, column: str) -> list[PromptRow]:
        """Returns the first row for each value of a column."""
        values = [record[column] for table in self.tables for record in table.records([column])]
        first: dict[Any, int] = {}
        for index in self.kept.tolist():
            first.setdefault(str(values[index]), index)
        return self._rows(list(first.values()))

    @property
    def shows_images(self) -> bool:
        return self.prompts.reader is not None and any(self.config.image_key in table.columns for table in self.tables)

    def one_of_each_source(self) -> list[PromptRow]:
        """Returns the first row of every data source and style, to try a scorer on before training starts."""
        _, first = np.unique(self.codes[self.kept], return_index=True)
        return self._rows(self.kept[np.sort(first)].tolist())

    @property
    def identity(self) -> str:
        """Equal for equal files, in the same order, of which the same rows are used."""
        return hashlib.sha256(self._content + self.kept.astype("<i8").tobytes()).hexdigest()

    def _needed(self) -> Sequence[str]:
        """Returns the columns without which rows cannot be used."""
        return self.config.prompt_key, self.config.reward_fn_key, TRUTH

    def _check(self) -> None:
        """Refuses files without rows, or without a column that is needed."""
        if not self.tables:
            raise UserError("no data file is named", key=self.key, fix=f"{self.key}=train.parquet")
        for table in self.tables:
            if not table.count:
                raise UserError("holds no rows", key=self.key, value=table.path, fix="write it again, or leave it out")
            for column in self._needed():
                if column not in table.columns:
                    raise self._missing(table, column)
            self._check_rows(table)

    def _check_rows(self, table: Table) -> None:
        """Refuses the first row that cannot be used. Rows for scorers are checked as those are looked up."""

    def _scorers(self) -> tuple[list[tuple[str, str]], np.ndarray]:
        """Returns the pairs of data source and style that rows have, and the number of its own for each row; refuses
        the first row that no scorer could be called for."""
        numbers: dict[tuple[str, str], int] = {}
        codes = []
        for table in self.tables:
            scorers = scorers_of(table, self.config.reward_fn_key)
            own = [numbers.setdefault((str(source), str(style)), len(numbers)) for source, style in scorers["pairs"]]
            codes.append(np.array(own, np.int32)[scorers["codes"]])
        return list(numbers), np.concatenate(codes)

    def _missing(self, table: Table, column: str) -> UserError:
        setting = {self.config.prompt_key: "data.prompt_key", self.config.reward_fn_key: "data.reward_fn_key"}.get(
            column
        )
        return UserError(
            f"{table.path} has no column {column!r}; it has {', '.join(map(repr, table.columns)) or 'none'}",
            key=self.key,
            fix=f"name the right one: {setting}=..." if setting else 'add it: {"style": "rule", "ground_truth": "..."}',
        )

    def _tell_of_equal_rows(self) -> None:
        """Warns if most of the first rows are the same few: a file that was not made as it was meant to be."""
        seen = list[str]()
        for table in self.tables if not (self.config.custom_cls.path or self.shows_images) else ():
            for row in table.rows(range(min(LOOKED_AT, table.count))):
                seen.append(repr({**row, EXTRA: None}))  # it has a number of its own in many files
        again = len(seen) - len(set(seen))
        if 2 * again > len(seen):
            log.warning("%s: %d of the first %d rows are equal to an earlier one", self.key, again, len(seen))

    def _leave_out_overlong(self) -> None:
        longest, column = self.config.max_prompt_length, self.config.prompt_key

        def measure(positions: range) -> list[int]:
            return self.prompts.lengths(self.reading.prompts([int(self.kept[position]) for position in positions]))

        texts = PromptLengths(self.reading, self.kept, self.encoder)
        work = measure if self.prompts.reader else texts
        lengths = self._lengths(work, self.prompts.identity(), self.identity + column)
        fits = lengths <= longest
        if not fits.any():
            reason = f"every prompt of {self.key} is longer: the shortest has {lengths.min()} tokens"
            raise UserError(reason, key="data.max_prompt_length", value=longest, fix="raise it")
        self._leave_out(fits, f"prompts have more than data.max_prompt_length={longest} tokens")

    def _lengths(self, measure: Callable[[range], list[int]], encoder: bytes | None, decided: str) -> np.ndarray:
        """Returns a number for each row that is used. The identity of its encoder, if it has one, and what else is
        `decided` stand for all that the numbers depend on."""
        count, workers = len(self), self.config.filter_overlong_prompts_workers

        def make() -> Arrays:
            return {"lengths": np.fromiter(over_ranges(count, measure, "measuring prompts", workers), np.int32, count)}

        return kept_arrays("prompts", encoder + decided.encode() if encoder else None, make)["lengths"]

    def _leave_out(self, fits: np.ndarray, too_long: str) -> None:
        self.left_out = int((~fits).sum())
        if self.left_out:
            log.warning("%s: %d of %d %s and are left out", self.key, self.left_out, len(fits), too_long)
        self.kept = self.kept[fits]

    def _rows(self, indices: list[int]) -> list[PromptRow]:
        config = self.config
        rows = self.reading.prompts(indices)
        return [
            PromptRow(
                index=index,
                group=index,
                tokens=self._shortened(tokens, images, row.location),
                messages=row.messages,
                data_source=source_of(row.record[config.reward_fn_key], row.location, config.reward_fn_key),
                ground_truth=truth_of(row.record[TRUTH], row.location),
                extra_info=row.record.get(EXTRA) or {},
                location=row.location,
                style=self.scored_by.get(style := style_of(row.record[TRUTH]), style),
                images=images,
                written_prompt=row.record[TRUTH].get(WRITTEN, row.messages),
                agent=row.record.get(AGENT),
                environment=row.record.get(ENVIRONMENT),
            )
            for index, row, (tokens, images) in zip(indices, rows, self.prompts.encode(rows), strict=True)
        ]

    def _shortened(self, tokens: list[int], images: Images | None, location: str) -> list[int]:
        """An image is never cut: its features would find no tokens."""
        how = self.config.truncation if images is None else "error"
        return truncated(tokens, self.config.max_prompt_length, how, location)


def scorers_of(table: Table, source: str) -> Arrays:
    """Returns the pairs of data source and style in a table, and the number of each row's. Those of a large table are
    kept on disk, by its content."""

    def make() -> Arrays:
        numbers: dict[tuple[str, str], int] = {}
        pairs = over_ranges(table.count, Scorers(table, source))
        codes = np.fromiter((numbers.setdefault(pair, len(numbers)) for pair in pairs), np.int32, table.count)
        return {"pairs": np.array(list(numbers), dtype=np.str_), "codes": codes}

    decided = b"scorers 2" + table.digest() + source.encode()
    return kept_arrays("rows", decided if table.count >= MANY else None, make)
