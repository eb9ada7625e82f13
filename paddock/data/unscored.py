"""Rows that no scorer is called for: prompts to be answered, and prompts with the answers to learn."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from paddock.config.schema import DataConfig, row_tokens
from paddock.data.chat import Messages, limited, messages_of, whole_text
from paddock.data.columns import EXTRA, RULE, asked, top, value_at
from paddock.data.dataset import PromptDataset, PromptRow
from paddock.data.dialogue import Dialogue
from paddock.data.reading import Asked
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

    def _wanted(self, columns: list[str]) -> Sequence[str]:
        return columns

    def _adapted(self, table: Table) -> Table:
        return asked(table, self.config, answered=False)

    def _needed(self) -> Sequence[str]:
        return (self.config.prompt_key,)

    def _scorers(self) -> tuple[list[tuple[str, str]], np.ndarray]:
        """Gives all rows one source and one style: no scorer is called for them."""
        return [(UNKNOWN, RULE)], np.zeros(self.total, np.int32)

    def _rows(self, indices: list[int]) -> list[PromptRow]:
        rows = self.reading.prompts(indices)
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

    def _adapted(self, table: Table) -> Table:
        config, chat_template = self.config, self.encoder.tokenizer.chat_template
        templated = chat_template is not None or "chat_template" in config.apply_chat_template_kwargs
        return asked(table, config, config.prompt_as_message and templated)

    def _check_rows(self, table: Table) -> None:
        column = self.config.prompt_key
        if THINKING in table.columns:
            log.warning("%s: the column %s is not read: data.apply_chat_template_kwargs.%s=... holds for all rows",
                        table.path, THINKING, THINKING)  # fmt: skip
        wanted = (column, *ANSWER_COLUMNS, EXTRA, top(self.config.answer_key or EXTRA))
        present = list(dict.fromkeys(name for name in wanted if name in table.columns))
        for row, record in enumerate(table.records(present)):
            location = table.location(row)
            split(messages_of(record.get(column), location, column), record, location, self.config)

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
        rows = self.reading.prompts(indices)
        prompts: list[Messages] = []
        answers: list[Any] = []
        by_tools: dict[str, list[int]] = {}
        with limited("the first row", column) as begin:
            for number, row in enumerate(rows):
                begin(row.location)
                prompt, answer = split(row.messages, row.record, row.location, self.config)
                tools = self._tools(row.messages, row.record)
                if tools is not None:
                    prompt, answer = self._conversation(row, tools)  # type: ignore[assignment]
                prompts.append(prompt)
                answers.append(answer)
                by_tools.setdefault(tools or "", []).append(number)
        single = [number for number, answer in enumerate(answers) if isinstance(answer, str)]
        if single:
            texts = [answers[number] for number in single]
            tokens = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            for number, ids in zip(single, tokens, strict=True):
                answers[number] = [*ids, tokenizer.eos_token_id]
        encoded: dict[int, list[int]] = {}
        for tools, same in by_tools.items():
            asked, where = [prompts[number] for number in same], [rows[number].location for number in same]
            known = json.loads(tools) if tools else None
            encoded.update(zip(same, self.dialogue.prompts(asked, known, where, column), strict=True))
        return [row.location for row in rows], prompts, [encoded[number] for number in range(len(rows))], answers

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

    def _conversation(self, row: Asked, tools: str) -> tuple[Messages, Turns]:
        """Returns the messages before the assistant's first turn, and all that follows."""
        messages: Any = row.messages
        try:
            first, turns = self.dialogue.turns(list(messages), json.loads(tools) if tools else None)
        except UserError as error:
            raise bad_row(row.location, named(row.record), error.reason, error.fix or "mend the row") from error
        return list(messages[:first]), Turns(tuple(turns))

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

        end = self.encoder.tokenizer.eos_token_id
        columns = f"{config.prompt_key} {config.prompt_as_message} {config.answer_key}"
        decided = f"{type(self).__name__} turns {limits} {columns} {end} {self.identity}"
        fits = self._lengths(excess, self.encoder.identity(), decided) <= 0
        wanted = f"data.max_prompt_length={limits[0]} or the answer data.max_response_length={limits[1]}"
        if config.max_length is not None:
            wanted += f" or both together data.max_length={config.max_length}"
        if not fits.any():
            raise UserError(f"in every row the prompt exceeds {wanted} tokens", key=self.key, fix="raise them")
        self._leave_out(fits, f"rows have prompts that exceed {wanted} tokens")

    def _cut(self, answer: Any, location: str) -> Any:
        """An answer is cut at its end, whatever `data.truncation` does to prompts, and then does not end."""
        longest = self.config.max_response_length
        if len(answer) > longest and self.config.truncation == "error":
            reason = f"{location} has an answer of {len(answer)} tokens"
            fix = f"{len(answer)} or more, data.filter_overlong_prompts=True, or data.truncation=right"
            raise UserError(reason, key="data.max_response_length", value=longest, fix=fix)
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
        reason = f"{location} has a prompt of {len(prompt)} tokens and an answer of {len(answer)}"
        fix = f"data.max_length={len(prompt) + len(answer)} or more, or {ways}"
        raise UserError(reason, key="data.max_length", value=longest, fix=fix)


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
