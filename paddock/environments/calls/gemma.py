"""Gemma's format: call:name{key:value}, between two marks, with texts in quotes that are marks of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.environments.calls.format import json_value, written_json
from paddock.environments.environment import Call, Malformed

BARE = re.compile(r"[^,\[\]{}]+")


class UnreadableCall(Exception):
    """Raised inside of the reader where values cannot be read; says why."""


@dataclass(frozen=True)
class Quoted:
    """Reads and writes calls as call:name{key:value}. A text that holds the quote cannot be written: it is read as
    malformed."""

    opening: str
    closing: str
    quote: str

    @property
    def form(self) -> str:
        return f"{self.opening}call:NAME{{KEY:{self.quote}TEXT{self.quote},OTHER:1}}{self.closing}"

    def read(self, text: str) -> Iterator[Call | Malformed]:
        at = text.find(self.opening)
        while at >= 0:
            begun = at + len(self.opening)
            brace = text.find("{", begun)
            name = text[begun:brace].strip()
            try:
                if brace < 0 or not name.startswith("call:") or not name.removeprefix("call:").strip():
                    raise UnreadableCall("it has no call:NAME{...}")
                arguments, end = self._value(text, brace)
                if not text[end:].lstrip().startswith(self.closing):
                    raise UnreadableCall(f"there is no {self.closing} behind it")
                yield Call(name.removeprefix("call:").strip(), arguments)
            except (UnreadableCall, RecursionError) as error:
                end = text.find(self.closing, begun)
                end = end if end >= 0 else len(text)
                why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
                yield Malformed(text[at : end + len(self.closing)], f"{why}; write {self.form}")
            at = text.find(self.opening, end)

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        """Returns the value at a place of the text, and the place behind it."""
        at = behind_spaces(text, at)
        if text.startswith(self.quote, at):
            return self._quoted(text, at)
        if text.startswith("{", at):
            return self._object(text, at)
        if text.startswith("[", at):
            return self._list(text, at)
        bare = BARE.match(text, at)
        if not bare:
            raise UnreadableCall("a value is missing")
        written = bare[0].strip()
        value, wrong = json_value("null" if written == "None" else written)
        return written if wrong else value, bare.end()

    def _quoted(self, text: str, at: int) -> tuple[str, int]:
        begun = at + len(self.quote)
        end = text.find(self.quote, begun)
        if end < 0:
            raise UnreadableCall(f"a text is not closed by {self.quote}")
        return text[begun:end], end + len(self.quote)

    def _list(self, text: str, at: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = behind_spaces(text, at + 1)
        while not text.startswith("]", at):
            value, at = self._value(text, at)
            found.append(value)
            at = behind_comma(text, at, "]")
        return found, at + 1

    def _object(self, text: str, at: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = behind_spaces(text, at + 1)
        while not text.startswith("}", at):
            if text.startswith(self.quote, at):
                key, colon = self._quoted(text, at)
            else:
                colon = text.find(":", at)
                key = text[at:colon].strip()
            if not text.startswith(":", colon) or not key:
                raise UnreadableCall("an argument has no KEY:")
            found[key], at = self._value(text, colon + 1)
            at = behind_comma(text, at, "}")
        return found, at + 1

    def render(self, calls: Sequence[Call]) -> str:
        return "".join(f"{self.opening}call:{one.name}{self._written(one.arguments)}{self.closing}" for one in calls)

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, list | tuple):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, Mapping):
            return f"{{{','.join(f'{key}:{self._written(one)}' for key, one in value.items())}}}"
        return written_json(value)


def behind_spaces(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def behind_comma(text: str, at: int, closing: str) -> int:
    """Returns the place behind a comma, or of what closes the list."""
    at = behind_spaces(text, at)
    if text.startswith(",", at):
        return behind_spaces(text, at + 1)
    if not text.startswith(closing, at):
        raise UnreadableCall(f"a comma or {closing} is missing")
    return at


FUNCTION_GEMMA = Quoted("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = Quoted("<|tool_call>", "<tool_call|>", '<|"|>')
