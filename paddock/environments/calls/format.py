"""A format of tool calls, and the parts that readers of formats share: JSON values, marks, and calls made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.environments.environment import Call, Malformed

Read = tuple[list[Call], list[Malformed]]
THINKING = re.compile(r"<think>.*?(?:</think>|$)", re.S)
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

    def parse(self, text: str) -> Read:
        """Returns the calls in a turn, and those that cannot be read, in the order in which they were written.

        The turn is decoded with special tokens, without its end of turn. What stands in thinking is no call.
        """
        found = list(self.read(outside_thinking(text)))
        calls = [one for one in found if isinstance(one, Call)]
        return calls, [one for one in found if isinstance(one, Malformed)]


def outside_thinking(text: str) -> str:
    """Returns what stands outside <think>...</think>; the generation prompt may have opened it."""
    opened, closed = text.find("<think>"), text.find("</think>")
    if closed >= 0 and (opened < 0 or closed < opened):
        text = text[closed + len("</think>") :]
    return THINKING.sub("", text)


def call_of(value: Any, text: str, wrong: str | None = None) -> Call | Malformed:
    """Returns a JSON value as a call; `wrong` says why there is no value."""
    if wrong is not None:
        return Malformed(text, wrong)
    if not isinstance(value, dict):
        return Malformed(text, f"a call is an object {OBJECT}, and this is {kind_of(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return Malformed(text, f'the call has no "name" of a tool; write {OBJECT}')
    given = (value[key] for key in ("arguments", "parameters") if value.get(key) is not None)
    arguments: Any = next(given, {})
    return call_with(name, arguments, text, str(value.get("id") or ""))


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


def object_of(call: Call, arguments: str = "arguments") -> dict[str, Any]:
    return {"name": call.name, arguments: dict(call.arguments)}


def written_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def written_value(value: Any) -> str:
    return value if isinstance(value, str) else written_json(value)
