"""Rows without the columns that scorers are called with: the question and the answer are found by their names."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from paddock.config.schema import DataConfig
from paddock.data.tables import Record, Table, bad_row
from paddock.errors import UserError
from paddock.facts.files import ANSWERS, CONVERSATIONS, TRUTH, as_messages, prompt_column, without_prompts

log = logging.getLogger(__name__)

EXTRA = "extra_info"
WRITTEN = "written_prompt"
"""Under `reward_model`: the prompt as the file has it, for functions that are given what the data holds."""
AGENT = "agent_name"
"""Names the agent loop of a row, as verl's data have it."""
ENVIRONMENT = "environment"
"""Names the environment of a row where a run has several, as TRL's data have it."""
INSTRUCTION, INPUT = "instruction", "input"
RULE, MODEL = "rule", "model"
"""Styles of rows: who scores their answers."""


def wanted_columns(columns: Sequence[str], config: DataConfig) -> Sequence[str]:
    """Rows of the full schema need seven columns; of others every column may be what a scorer asks for."""
    if TRUTH not in columns:
        return columns
    return (config.prompt_key, config.reward_fn_key, TRUTH, EXTRA, config.image_key, config.video_key, AGENT,
            ENVIRONMENT)  # fmt: skip


def scored(table: Table, config: DataConfig, templated: bool, key: str) -> Table:
    """The table as scorers need it: prompt, data_source, reward_model, extra_info. One that has them stays as it is.

    `templated`: the tokenizer has a chat template, so that a question is asked as a message of the user's.
    """
    if TRUTH in table.columns or not table.count:
        return table
    prompt = prompt_column(table.columns, config.prompt_key)
    if prompt is None:
        raise without_prompts(table.path, table.columns, config.prompt_key, key)
    known = next((name for name in ANSWERS if name in table.columns), None)
    answer = config.answer_key or known
    if answer is not None and answer not in table.columns:
        reason = f"{table.path} has no such column; it has {', '.join(map(repr, table.columns))}"
        fix = f"data.answer_key={known or '...'}"
        raise UserError(reason, key="data.answer_key", value=answer, fix=fix)
    if answer is None and config.reward_fn_key in table.columns:
        return table  # rows for scorers that lack what they are scored by
    rows = PlainRows(table, config, prompt, answer, templated)
    log.info("%s", rows.described(key))
    return rows


def top(column: str) -> str:
    """Returns the column of the table that holds a value: `extra_info.question` is in `extra_info`."""
    return column.partition(".")[0]


def asked(table: Table, config: DataConfig, as_message: bool = False, answered: bool = True) -> Table:
    """The table with its prompts under the name of `data.prompt_key`: no scorer is called for its rows.

    `as_message`: a prompt that is a text becomes a message of the user's. Not `answered`: without the answer that a
    conversation ends with.
    """
    inside = top(config.prompt_key) in table.columns
    prompt = config.prompt_key if inside else prompt_column(table.columns, config.prompt_key)
    shortened = prompt in CONVERSATIONS and not answered
    same = prompt in table.columns and prompt == config.prompt_key and not as_message and not shortened
    if prompt is None or same:
        return table
    log.info("%s: prompts are in column %r (data.prompt_key)", table.path, prompt)
    return Renamed(table, config.prompt_key, prompt, as_message, shortened)


class Renamed(Table):
    """Rows with a prompt column under another name, or a prompt that is asked as a message."""

    def __init__(self, table: Table, name: str, column: str, as_message: bool, shortened: bool):
        super().__init__(table.path, list(dict.fromkeys([*table.columns, name])), table.count)
        self.table, self.name, self.column = table, name, column
        self.as_message, self.shortened = as_message, shortened

    def rows(self, indices: Sequence[int], names: Sequence[str] | None = None) -> list[Record]:
        return [{**record, self.name: self.prompt(record)} for record in self.table.rows(indices)]

    def digest(self) -> bytes:
        return self.table.digest()

    def prompt(self, record: Record) -> Any:
        text = question(record, self.column)
        if self.shortened and is_answered(text):
            return text[:-1]
        return [{"role": "user", "content": text}] if self.as_message and isinstance(text, str) and text else text


class PlainRows(Table):
    """A question and an answer become a prompt and the truth that a scorer gets; every column is in `extra_info`."""

    def __init__(self, table: Table, config: DataConfig, prompt: str, answer: str | None, templated: bool):
        columns = [*table.columns, config.prompt_key, config.reward_fn_key, TRUTH, EXTRA]
        super().__init__(table.path, list(dict.fromkeys(columns)), table.count)
        self.table, self.config, self.prompt, self.answer, self.templated = table, config, prompt, answer, templated
        self.source = PurePath(table.path).name.split(".")[0] or table.path
        """The file's name up to its first dot: what scorers are told where no column says more."""

    def described(self, key: str) -> str:
        """Returns one line for people: which columns were taken for what."""
        answers = f"answers from {self.answer!r} (data.answer_key)" if self.answer else "no column of answers"
        if not self.answer and self.prompt in CONVERSATIONS:
            answers = "answers from the assistant's last messages"
        column = self.config.reward_fn_key
        source = f"from {column!r}" if column in self.table.columns else repr(self.source)
        return (
            f"{key}: {self.table.path}: {self.table.count:,} rows; prompts from {self.prompt!r} (data.prompt_key), "
            f"{answers}; data_source {source}{self._asked()}"
        )

    def _asked(self) -> str:
        """Says how a text is asked: a base model may want it as it is."""
        if not isinstance(question(self.table.rows([0])[0], self.prompt), str):
            return ""
        way = "as messages of the user's, by the chat template" if self.templated else "as plain texts"
        return f"; prompts are asked {way} (data.apply_chat_template)"

    def rows(self, indices: Sequence[int], names: Sequence[str] | None = None) -> list[Record]:
        found = self.table.rows(indices, names and self._needed())
        return [self._row(record, self.table.location(row)) for row, record in zip(indices, found, strict=True)]

    def digest(self) -> bytes:
        """Returns a hash of the content and of the columns that are taken from it."""
        taken = repr((self.prompt, self.answer, self.templated, self.config.reward_fn_key, self.source))
        if self.prompt in CONVERSATIONS and self.answer:
            taken += " without the answer"  # lengths that are kept from before are those of prompts that held it
        return hashlib.sha256(self.table.digest() + taken.encode()).digest()

    def _needed(self) -> list[str]:
        """The columns of the table that a prompt, its truth and its source are made of."""
        used = (self.prompt, self.answer, INPUT, self.config.reward_fn_key, EXTRA)
        return [name for name in used if name in self.table.columns]

    def _row(self, record: Record, location: str) -> Record:
        value, truth = question(record, self.prompt), None
        answered = self.prompt in CONVERSATIONS and is_answered(value)
        if self.answer is not None:
            truth = truth_text(record.get(self.answer), location, self.answer)
        elif answered:
            truth = value[-1].get("content")
        if answered:
            value = value[:-1]  # the policy is not shown the answer
        written = value
        if self.templated and isinstance(value, str) and value:
            value = [{"role": "user", "content": value}]
        given = record.get(EXTRA)
        extra = {name: item for name, item in record.items() if name not in (self.prompt, EXTRA)}
        source = record.get(self.config.reward_fn_key) or self.source
        return {
            **record,
            self.config.prompt_key: value,
            self.config.reward_fn_key: source,
            TRUTH: {"style": RULE, "ground_truth": truth, "optional": self.answer is None, WRITTEN: written},
            EXTRA: {**extra, **(given if isinstance(given, dict) else {})},
        }


def value_at(record: Record, column: str) -> Any:
    """Returns a column's value; a name with dots leads into objects, as `extra_info.answer` does."""
    if column in record:
        return record[column]
    value: Any = record
    for name in column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def question(record: Record, column: str) -> Any:
    """Returns what a row asks; for an instruction with an input, both."""
    value = as_messages(value_at(record, column))
    more = record.get(INPUT)
    if column == INSTRUCTION and isinstance(value, str) and isinstance(more, str) and more.strip():
        return f"{value}\n\n{more}"
    return value


def truth_text(value: Any, location: str, column: str) -> str | list[str]:
    """Returns the true answer as a text: a number as it is written, an object as JSON. A list of texts or numbers
    stays a list: each of them is a right answer."""
    if value is None or value == "" or value == [] or value != value:  # NaN is how pandas writes a missing value
        raise bad_row(location, column, "there is no answer", "write one, or leave the row out")
    if isinstance(value, bytes):
        raise bad_row(location, column, f"is {value!r:.40}, bytes and not a text", "write the column as text")
    if isinstance(value, list) and not any(isinstance(item, list | dict | None) for item in value):
        return [_as_text(item) for item in value]
    return _as_text(value)


def _as_text(value: Any) -> str:
    """Decimals, dates and times, which tables have and JSON does not, are written as they are, without quotes."""
    if value is None or isinstance(value, int | float | list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def is_answered(value: Any) -> bool:
    """True for messages behind which the assistant has answered."""
    last = value[-1] if isinstance(value, list) and len(value) > 1 else None
    return isinstance(last, dict) and last.get("role") == "assistant"
