"""A format of tool calls, and the parts that readers of formats share: JSON values, marks, and calls made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.environments.environment import Call, Malformed

Read = tuple[list[Call], list[Malformed]]
THINKING = ("<think>", "</think>")
OBJECT = '{"name": "...", "arguments": {...}}'


@dataclass(frozen=True)
class Format:
    """Holds how a family of models writes tool calls."""

    name: str
    read: Callable[[str], Iterator[Call | Malformed]]
    render: Callable[[Sequence[Call]], str]
    """Returns calls as the family writes them, without the end of the turn."""
    marks: tuple[str, ...]
    """Texts that stand in chat templates of the family, all of them."""
    thinking: tuple[str, str] = THINKING
    """Marks around thinking."""
    around: tuple[str, str] = ("<tool_call>", "</tool_call>")
    """Marks around calls; an empty second one: calls go on to the end of the turn."""
    thought: str = "reasoning_content"
    """Field of a message that holds thinking."""
    content: str = ""
    """Mark behind which the family writes contents; empty: contents have no mark."""

    def message(self, text: str, calls: Sequence[Call], opened: bool) -> dict[str, Any]:
        """Returns a turn with its calls as a message of a chat, as transformers' parsers of responses do: of several
        texts, or thoughts, the last one. `opened`: the generation prompt has begun the thinking."""
        text = self.thinking[0] * opened + text
        thoughts = [one[1].strip() for one in re.finditer(stretch(*self.thinking), text, re.S) if one[1].strip()]
        if self.content:
            text = text.partition(self.content)[2]
        if calls and self.around[0] not in text:
            text = ""  # calls without marks are the whole turn
        beside = f"{stretch(*self.thinking)}|{stretch(*self.around)}" if calls else stretch(*self.thinking)
        texts = [one.strip() for one in re.split(beside.replace("(.", "(?:."), text, flags=re.S) if one.strip()]
        found: dict[str, Any] = {"role": "assistant", "content": texts[-1] if texts else ""}
        found |= {self.thought: thoughts[-1]} if thoughts else {}
        written = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            | ({"id": call.id} if call.id else {})
            for call in calls
        ]
        return found | ({"tool_calls": written} if calls else {})

    def parse(self, text: str) -> Read:
        """Returns the calls in a turn, and those that cannot be read, in the order in which they were written.

        The turn is decoded with special tokens, without its end of turn. What stands in thinking is no call.
        """
        found = self.read_outside_thinking(text)
        calls = [one for one in found if isinstance(one, Call)]
        return calls, [one for one in found if isinstance(one, Malformed)]

    def read_outside_thinking(self, text: str) -> list[Call | Malformed]:
        """Reads the turn without its thinking. Marks of thinking inside of the texts of a call are text, behind what a
        turn begins with at least: a turn of many thoughts is not read again for each."""
        for _ in range(2):
            found = list(self.read(text))
            calls = [written_json(dict(one.arguments)) for one in found if isinstance(one, Call)]
            if self.thinking_marks(text) == sum(map(self.thinking_marks, calls)):
                return found
            text = without_thinking(text, *self.thinking, most=1)
        return list(self.read(without_thinking(text, *self.thinking)))

    def thinking_marks(self, text: str) -> int:
        return sum(text.count(mark) for mark in self.thinking)


def stretch(opening: str, closing: str) -> str:
    """Returns a pattern of what stands between two marks, or between the first and the end of the text."""
    return f"{re.escape(opening)}(.*?)(?:{re.escape(closing) or '$'}|$)"


def without_thinking(text: str, opening: str, closing: str, most: int = 0) -> str:
    """Removes the first `most` thoughts, or all; the generation prompt may have opened the first one."""
    opened, closed = text.find(opening), text.find(closing)
    if closed >= 0 and (opened < 0 or closed < opened):
        text = text[closed + len(closing) :]
        if most == 1:
            return text
    return re.sub(f"{re.escape(opening)}.*?(?:{re.escape(closing)}|$)", "", text, count=most, flags=re.S)


def call_of(
    value: Any, text: str, wrong: str | None = None, form: str = OBJECT, name_key: str = "name", id_key: str = "id"
) -> Call | Malformed:
    """Returns a JSON value as a call; `wrong` says why there is no value, `form` shows what to write."""
    if wrong is not None:
        return Malformed(text, wrong)
    if not isinstance(value, dict):
        return Malformed(text, f"a call is an object {form}, and this is {kind_of(value)}")
    name = value.get(name_key)
    if not isinstance(name, str) or not name.strip():
        return Malformed(text, f'the call has no "{name_key}" of a tool; write {form}')
    given = (value[key] for key in ("arguments", "parameters") if value.get(key) is not None)
    arguments: Any = next(given, {})
    return call_with(name, arguments, text, str(value.get(id_key) or ""))


def call_with(name: str, arguments: Any, text: str, identity: str = "") -> Call | Malformed:
    if isinstance(arguments, str):
        arguments, wrong = json_value(arguments)
        if wrong is not None:
            return Malformed(text, f"the arguments of {name.strip()}: {wrong}")
    if not isinstance(arguments, Mapping):
        return Malformed(
            text, f'the arguments of {name.strip()} are {kind_of(arguments)}, not an object {{"name": value}}'
        )
    return Call(name.strip(), arguments, identity)


def json_value(text: str) -> tuple[Any, str | None]:
    """Returns a JSON value, and what is wrong with the text if it is none."""
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, ensure_ascii=False).encode()
        return value, None
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        return None, f"the JSON cannot be read: {error.msg} at character {error.pos}, near {near!r}"
    except UnicodeEncodeError:
        return None, "the JSON holds half of a surrogate pair, which is no character"
    except (ValueError, RecursionError) as error:
        return None, f"the JSON cannot be read: {str(error) or type(error).__name__}"


def leading_json(text: str) -> tuple[Any, str | None, str]:
    """Returns the JSON value that a text begins with, what is wrong with it, and the text behind it."""
    text = text.lstrip()
    try:
        end = json.JSONDecoder(strict=False).raw_decode(text)[1]
    except (ValueError, RecursionError):
        end = len(text)
    return *json_value(text[:end]), text[end:]


def kind_of(value: Any) -> str:
    names: dict[type, str] = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text",
                              list: "a list", dict: "an object"}  # fmt: skip
    return names.get(type(value), type(value).__name__)


def blocks(text: str, opening: str, closing: str) -> Iterator[tuple[str, Malformed | None]]:
    """Yields what stands between two tags; a tag that is not closed is malformed, and what follows belongs to it."""
    for part in text.split(opening)[1:]:
        inner, closed, _ = part.partition(closing)
        yield inner, None if closed else Malformed(opening + part, f"{opening} is not closed by {closing}")


def json_blocks(text: str, opening: str, closing: str) -> Iterator[tuple[str, Malformed | None]]:
    """Yields what stands between two tags, as `blocks` does; tags inside of the texts of a JSON value are text."""
    _, opened, rest = text.partition(opening)
    while opened:
        _, wrong, behind = leading_json(rest)
        behind = behind.lstrip()
        if not wrong and behind.startswith(closing):
            yield rest[: len(rest) - len(behind)], None
            _, opened, rest = behind.partition(opening)
        else:
            part, opened, rest = rest.partition(opening)
            yield from blocks(opening + part, opening, closing)


def object_of(number: int, call: Call) -> dict[str, Any]:
    return {"name": call.name, "arguments": dict(call.arguments)}


def object_with_id(number: int, call: Call) -> dict[str, Any]:
    return object_of(number, call) | ({"id": call.id} if call.id else {})


@dataclass(frozen=True)
class Objects:
    """Writes calls as JSON objects between two marks, and reads them: objects, or lists of them. Marks inside of JSON's
    texts are text."""

    opening: str = ""
    closing: str = ""
    before: str = "["
    """Text before the first object."""
    between: str = ", "
    """Text between two objects."""
    behind: str = "]"
    """Text behind the last object."""
    form: str = OBJECT
    """What a call looks like, for a policy whose call cannot be read."""
    made: Callable[[int, Call], dict[str, Any]] = object_of
    """Returns a call, and its number, as an object."""
    call: Callable[[Any, str], Call | Malformed] = call_of
    """Returns an object, and its text, as a call."""

    def render(self, calls: Sequence[Call]) -> str:
        objects = self.between.join(written_json(self.made(number, call)) for number, call in enumerate(calls))
        return f"{self.opening}{self.before}{objects}{self.behind}{self.closing}"

    def read(self, text: str) -> Iterator[Call | Malformed]:
        opening, closing = self.opening, self.closing
        _, opened, rest = text.partition(opening)
        while opened:
            begun, calls = rest, list[Call | Malformed]()
            while rest.strip() and not rest.lstrip().startswith(closing):
                value, wrong, behind = leading_json(rest)
                if wrong:
                    inner, closed, behind = rest.partition(closing)
                    calls.append(Malformed(inner, f"{wrong}; write {self.form}"))
                    rest = closed + behind
                else:
                    objects = value if isinstance(value, list) else [value]
                    calls.extend(self.call(each, written_json(each)) for each in objects)
                    rest = behind
            if not rest.strip():
                yield Malformed(opening + begun, f"{opening} is not closed by {closing}")
            else:
                yield from calls or [Malformed(opening + closing, f"there is no call in it; write {self.form}")]
            _, opened, rest = rest.partition(opening)


def headed_calls(
    text: str, opening: str, middle: str, closing: str, form: str, call: Callable[[str, Any, str], Call | Malformed]
) -> Iterator[Call | Malformed]:
    """Yields the calls between two marks: `call` is given what stands before the middle mark, the JSON value behind it,
    and the whole. Marks inside of JSON's texts are text."""
    _, opened, rest = text.partition(opening)
    while opened:
        head, split, behind = rest.partition(middle)
        value, wrong, after = leading_json(behind)
        if split and closing not in head and not wrong and after.lstrip().startswith(closing):
            yield call(head.strip(), value, opening + rest[: len(rest) - len(after)] + closing)
        else:
            inner, closed, after = rest.partition(closing)
            wrong = json_value(inner.partition(middle)[2].strip())[1] if middle in inner else f"there is no {middle}"
            reason = f"{wrong}; write {form}" if closed else f"{opening} is not closed by {closing}"
            yield Malformed(opening + inner + closed, reason)
        _, opened, rest = after.partition(opening)


def written_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def written_value(value: Any) -> str:
    return value if isinstance(value, str) else written_json(value)
