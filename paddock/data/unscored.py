"""Rows that no scorer is called for: prompts to be answered, and prompts with the answers to learn."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from paddock.config.schema import DataConfig, row_tokens
from paddock.data.chat import Messages, limited, messages_of, whole_text
from paddock.data.columns import asked, top, value_at
from paddock.data.dataset import STYLES, PromptDataset, PromptRow
from paddock.data.dialogue import Dialogue
from paddock.data.labels import Labels
from paddock.data.lengths import prompt_lengths
from paddock.data.plugins import tables_of
from paddock.data.reading import EXTRA
from paddock.data.tables import Record, Table, bad_row
from paddock.errors import UserError
from paddock.facts.files import CONVERSATIONS, as_messages

log = logging.getLogger(__name__)

UNKNOWN = "unknown"
THINKING = "enable_thinking"
"""A column by which verl's rows choose how the template thinks."""
ANSWER_COLUMNS = ("answer", "response", "output")


class UnscoredDataset(PromptDataset):
    """Needs a prompt column alone; a row's `extra_info` is all that it holds."""

    def _open(self, files: Any, tokenizer: Any) -> None:
        opened = tables_of(files, tokenizer, self.config, self.key, lambda columns: columns)
        self._arrange([[asked(table, self.config, answered=False) for table in tables] for tables in opened])

    def _check(self) -> Labels:
        if not self.tables:
            raise UserError("no data file is named", key=self.key, fix=f"{self.key}=rows.parquet")
        for table in self.tables:
            if not table.count:
                raise UserError("holds no rows", key=self.key, value=table.path, fix="write it again, or leave it out")
            if self.config.prompt_key not in table.columns:
                raise self._missing(table, self.config.prompt_key)
        return self._unlabelled()

    def _unlabelled(self) -> Labels:
        """Gives all rows one source and one style: no scorer is called for them."""
        self.row_styles = Labels(STYLES, np.zeros(self.total, np.int8))
        return Labels([UNKNOWN], np.zeros(self.total, np.int32))

    def _rows(self, indices: list[int]) -> list[PromptRow]:
        rows = self._asked(indices)
        return [
            PromptRow(index, index, self._shortened(tokens, images, row.location), row.messages, UNKNOWN, None,
                      row.record, row.location, images=images)
            for index, row, (tokens, images) in zip(indices, rows, self.prompts.encode(rows), strict=True)
        ]  # fmt: skip


@dataclass(frozen=True)
class Turns:
    """Holds what stands behind the prompt of a conversation with several turns of the assistant."""

    stretches: tuple[tuple[list[int], bool], ...]
    """Tokens, and whether the assistant wrote them: those are learnt."""

    def __len__(self) -> int:
        return sum(len(tokens) for tokens, _ in self.stretches)

    def __getitem__(self, part: slice) -> Turns:
        """Returns the first tokens."""
        left, found = part.indices(len(self))[1], []
        for tokens, own in self.stretches:
            if left > 0:
                found.append((tokens[:left], own))
            left -= len(tokens)
        return Turns(tuple(found))


class AnswerDataset(UnscoredDataset):
    """A row's `ground_truth` is its answer in tokens, with the end-of-sequence token.

    The answer is in `data.answer_key`, or the first of these that a row has: the last message of `messages` if prompts
    are there, column `answer`, column `response`, the last message of a conversation that ends with the assistant's,
    `extra_info.answer`. Without a prompt column, `messages` is the conversation: if the assistant has several turns in
    it, all of them are learnt, and `ground_truth` are `Turns`. A column `tools` has the tools that the template tells
    of.
    """

    def _open(self, files: Any, tokenizer: Any) -> None:
        config = self.config
        template = tokenizer.chat_template is not None or "chat_template" in config.apply_chat_template_kwargs
        opened = tables_of(files, tokenizer, config, self.key, lambda columns: columns)
        as_message = config.prompt_as_message and template
        self._arrange([[asked(table, config, as_message) for table in tables] for tables in opened])

    def _check(self) -> Labels:
        for column in CONVERSATIONS:
            if self.tables and all(self._has_only(column, table) for table in self.tables):
                self.config = replace(self.config, prompt_key=column)
        sources = super()._check()
        column = self.config.prompt_key
        for table in self.tables:
            if THINKING in table.columns:
                log.warning("%s: the column %s is not read: data.apply_chat_template_kwargs.%s=... holds for all rows",
                            table.path, THINKING, THINKING)  # fmt: skip
            wanted = (column, *ANSWER_COLUMNS, EXTRA, top(self.config.answer_key or EXTRA))
            present = list(dict.fromkeys(name for name in wanted if name in table.columns))
            for row, record in enumerate(table.records(present)):
                location = table.location(row)
                split(messages_of(record.get(column), location, column), record, location, self.config)
        return sources

    def _has_only(self, conversations: str, table: Table) -> bool:
        return self.config.prompt_key not in table.columns and conversations in table.columns

    def _rows(self, indices: list[int]) -> list[PromptRow]:
        locations, prompts, tokens, answers = self._encoded(indices)
        pairs = [
            self._within(self._shortened(asked, None, location), self._cut(answer, location), location)
            for location, asked, answer in zip(locations, tokens, answers, strict=True)
        ]
        columns = zip(indices, locations, prompts, pairs, strict=True)
        return [
            PromptRow(index, index, asked, prompt, UNKNOWN, answer, {}, location)
            for index, location, prompt, (asked, answer) in columns
        ]

    def _encoded(self, indices: list[int]) -> tuple[list[str], list[Messages], list[list[int]], list[Any]]:
        """Returns locations, prompts, and the tokens of prompts and of answers."""
        column, tokenizer = self.config.prompt_key, self.encoder.tokenizer
        locations, messages, records = self._prompts(indices)
        prompts: list[Messages] = []
        answers: list[Any] = []
        by_tools: dict[str, list[int]] = {}
        with limited("the first row", column) as begin:
            for row, (conversation, record, location) in enumerate(zip(messages, records, locations, strict=True)):
                begin(location)
                prompt, answer = split(conversation, record, location, self.config)
                tools = self._tools(conversation, record)
                if tools is not None:
                    prompt, answer = self._conversation(conversation, tools, location, named(record))  # type: ignore[assignment]
                prompts.append(prompt)
                answers.append(answer)
                by_tools.setdefault(tools or "", []).append(row)
        single = [row for row, answer in enumerate(answers) if isinstance(answer, str)]
        if single:
            texts = tokenizer([answers[row] for row in single], add_special_tokens=False, verbose=False)["input_ids"]
            for row, tokens in zip(single, texts, strict=True):
                answers[row] = [*tokens, tokenizer.eos_token_id]
        encoded: dict[int, list[int]] = {}
        for tools, rows in by_tools.items():
            asked, where = [prompts[row] for row in rows], [locations[row] for row in rows]
            known = json.loads(tools) if tools else None
            encoded.update(zip(rows, self.dialogue.prompts(asked, known, where, column), strict=True))
        return locations, prompts, [encoded[row] for row in range(len(prompts))], answers

    def _tools(self, conversation: Messages, record: Record) -> str | None:
        """Returns the tools of a conversation of which all the assistant's turns are learnt, as JSON; None for a row
        with one answer."""
        whole = record.get(named(record))
        asked = record[self.config.prompt_key]
        if isinstance(conversation, str) or (whole is not asked and as_messages(whole) != as_messages(asked)):
            return None
        turns = sum(message["role"] == "assistant" for message in conversation)
        tools = record.get("tools")
        if turns <= 1 and not (turns and tools):
            return None
        return tools if isinstance(tools, str) else json.dumps(tools) if tools else ""

    def _conversation(self, messages: Messages, tools: str, location: str, column: str) -> tuple[Messages, Turns]:
        """Returns the messages before the assistant's first turn, and all that follows."""
        try:
            first, turns = self.dialogue.turns(list(messages), json.loads(tools) if tools else None)  # type: ignore[arg-type]
        except UserError as error:
            raise bad_row(location, column, error.reason, error.fix or "mend the row") from error
        return list(messages[:first]), Turns(tuple(turns))  # type: ignore[arg-type]

    @cached_property
    def dialogue(self) -> Dialogue:
        """A turn ends with the end of text, or with the special token that the template ends it with."""
        ends = frozenset({self.encoder.tokenizer.eos_token_id})
        plain = Dialogue(self.encoder, ends)
        return Dialogue(self.encoder, ends | {token for token in plain.closing[:1] if plain.is_special(token)})

    def _leave_out_overlong(self) -> None:
        """Rows whose prompt or answer is too long, or both together."""
        config = self.config
        limits = config.max_prompt_length, config.max_response_length, row_tokens(config)

        def excess(positions: range) -> list[int]:
            _, _, prompts, answers = self._encoded([int(self.kept[position]) for position in positions])
            pairs = zip(prompts, answers, strict=True)
            sizes = ((len(prompt), len(answer), len(prompt) + len(answer)) for prompt, answer in pairs)
            return [max(size - limit for size, limit in zip(row, limits, strict=True)) for row in sizes]

        tokenizer, identity = self.encoder.identity(), None
        if tokenizer:
            end = self.encoder.tokenizer.eos_token_id
            columns = f"{config.prompt_key} {config.prompt_as_message} {config.answer_key}"
            decided = f"{type(self).__name__} turns {limits} {columns} {end} {self.identity}"
            identity = hashlib.sha256(tokenizer + decided.encode()).digest()
        fits = prompt_lengths(len(self), excess, config.filter_overlong_prompts_workers, identity) <= 0
        wanted = f"data.max_prompt_length={limits[0]} or the answer data.max_response_length={limits[1]}"
        if config.max_length is not None:
            wanted += f" or both together data.max_length={config.max_length}"
        if not fits.any():
            raise UserError(f"in every row the prompt exceeds {wanted} tokens", key=self.key, fix="raise them")
        self.left_out = int((~fits).sum())
        if self.left_out:
            log.warning("%s: in %d of %d rows the prompt exceeds %s tokens; they are left out",
                        self.key, self.left_out, len(fits), wanted)  # fmt: skip
        self.kept = self.kept[fits]

    def _cut(self, answer: Any, location: str) -> Any:
        """An answer is cut at its end, whatever `data.truncation` does to prompts, and then does not end."""
        longest = self.config.max_response_length
        if len(answer) > longest and self.config.truncation == "error":
            raise UserError(
                f"{location} has an answer of {len(answer)} tokens",
                key="data.max_response_length",
                value=longest,
                fix=f"{len(answer)} or more, data.filter_overlong_prompts=True, or data.truncation=right",
            )
        return answer[:longest]

    def _within(self, prompt: list[int], answer: Any, location: str) -> tuple[list[int], Any]:
        """Returns a row of at most `data.max_length` tokens: its beginning or its end is cut, by `data.truncation`."""
        longest, how = self.config.max_length, self.config.truncation
        over = 0 if longest is None else len(prompt) + len(answer) - longest
        if over <= 0:
            return prompt, answer
        if how == "left" and over < len(prompt):
            return prompt[over:], answer
        if how == "right" and over < len(answer):
            return prompt, answer[: len(answer) - over]
        ways = "data.truncation=left or right" if how == "error" else "data.filter_overlong_prompts=True"
        raise UserError(
            f"{location} has a prompt of {len(prompt)} tokens and an answer of {len(answer)}",
            key="data.max_length",
            value=longest,
            fix=f"data.max_length={len(prompt) + len(answer)} or more, or {ways}",
        )


def named(record: Record) -> str:
    """Returns the row's column of a whole conversation."""
    return next((name for name in CONVERSATIONS if name in record), "")


def split(prompt: Messages, record: Record, location: str, config: DataConfig) -> tuple[Messages, str]:
    """Returns a row's prompt and its answer."""
    column = config.prompt_key
    if config.answer_key is not None:
        return prompt, text_of(value_at(record, config.answer_key), location, config.answer_key)
    said = isinstance(prompt, list) and len(prompt) > 1 and prompt[-1]["role"] == "assistant"
    for name in ANSWER_COLUMNS if not (said and column in CONVERSATIONS) else ():
        if record.get(name) is not None:
            return prompt, text_of(record[name], location, name)
    if said and isinstance(prompt, list):
        return prompt[:-1], text_of(prompt[-1]["content"], location, column)
    extra = record.get(EXTRA)
    if isinstance(extra, dict) and extra.get("answer") is not None:
        return prompt, text_of(extra["answer"], location, f"{EXTRA}.answer")
    raise bad_row(
        location,
        ANSWER_COLUMNS[0],
        f"there is no answer to learn: not here, not in 'response' or '{EXTRA}.answer', and {column!r} does not end "
        "with a message of the assistant",
        "add a column 'answer' with the text to learn, or leave the row out",
    )


def text_of(value: Any, location: str, column: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_row(location, column, f"is {value!r:.80}, not the text of an answer", "write the answer as a text")
    return whole_text(value, location, column)
