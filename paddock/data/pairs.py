"""Preference pairs: two answers to one prompt, one of which was preferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddock.data.chat import Messages, messages_of
from paddock.data.tables import Record, Table, bad_row
from paddock.data.unscored import AnswerDataset, text_of
from paddock.errors import UserError

CHOSEN, REJECTED = "chosen", "rejected"


@dataclass(frozen=True)
class AnswerPair:
    """Two answers in tokens, each as its conversation ends with it."""

    chosen: list[int]
    rejected: list[int]

    def __len__(self) -> int:
        """Returns the tokens of the longer answer, which decides whether the row fits."""
        return max(len(self.chosen), len(self.rejected))


class PairDataset(AnswerDataset):
    """A row's `ground_truth` is a `AnswerPair`.

    Columns `chosen` and `rejected` are texts, or messages that end with the assistant's. Where those hold the whole
    conversation, it is what was asked, and a prompt column is not needed.
    """

    def _needed(self) -> Sequence[str]:
        return CHOSEN, REJECTED

    def _check_rows(self, table: Table) -> None:
        used = [name for name in (self.config.prompt_key, CHOSEN, REJECTED) if name in table.columns]
        for row, record in enumerate(table.records(used)):
            self._parts(record, table.location(row))

    def _missing(self, table: Table, column: str) -> UserError:
        there = ", ".join(map(repr, table.columns)) or "none"
        fix = "preference pairs have the columns prompt, chosen and rejected"
        return UserError(f"{table.path} has no column {column!r}; it has {there}", key=self.key, fix=fix)

    def _parts(self, record: Record, location: str) -> tuple[Messages, str, str]:
        """Returns the prompt, the preferred answer, and the other."""
        (asked, chosen), (also, rejected) = (answer_of(record, name, location) for name in (CHOSEN, REJECTED))
        if asked != also:
            raise bad_row(location, REJECTED, "answers another conversation than 'chosen'", "pair two answers to one")
        if chosen == rejected:
            raise bad_row(location, REJECTED, "is the same as 'chosen'", "leave the row out: it prefers neither")
        column = self.config.prompt_key
        return asked or messages_of(record.get(column), location, column), chosen, rejected

    def _encoded(self, indices: list[int]) -> tuple[list[str], list[Messages], list[list[int]], list[Any]]:
        found = [self.reading.find(index) for index in indices]
        locations = [table.location(row) for table, row in found]
        parts = [self._parts(table.rows([row])[0], table.location(row)) for table, row in found]
        prompts, chosen, rejected = (list(column) for column in zip(*parts, strict=True))
        pairs = zip(self._answers(chosen, prompts), self._answers(rejected, prompts), strict=True)
        tokens = self.encoder.encode(prompts, locations, self.config.prompt_key)
        return locations, prompts, tokens, [AnswerPair(*pair) for pair in pairs]

    def _answers(self, texts: list[str], prompts: list[Messages]) -> list[list[int]]:
        """Encodes answers, each with its end: that of the text, or of the assistant's turn."""
        tokenizer = self.encoder.tokenizer
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        end = [tokenizer.eos_token_id]
        return [[*ids, *(end if isinstance(prompt, str) else self.encoder.closing)]
                for ids, prompt in zip(encoded, prompts, strict=True)]  # fmt: skip

    def _cut(self, answer: Any, location: str) -> Any:
        return AnswerPair(super()._cut(answer.chosen, location), super()._cut(answer.rejected, location))

    def _within(self, prompt: list[int], answer: Any, location: str) -> tuple[list[int], Any]:
        if self.config.max_length is not None:
            key = "data.max_length"
            fix = "set data.max_prompt_length and data.max_response_length"
            raise UserError("is for rows with one answer", key=key, value=self.config.max_length, fix=fix)
        return prompt, answer


def answer_of(record: Record, column: str, location: str) -> tuple[Messages | None, str]:
    """The conversation that the column holds before its answer, if it holds one, and the answer."""
    value = record.get(column)
    if isinstance(value, str):
        return None, text_of(value, location, column)
    messages = messages_of(value, location, column)
    if isinstance(messages, str) or messages[-1]["role"] != "assistant":
        raise bad_row(location, column, "does not end with a message of the assistant", "end it with the answer")
    return messages[:-1] or None, text_of(messages[-1]["content"], location, column)
