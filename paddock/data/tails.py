"""What a chat template writes around contents, found once: most templates write contents as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Render = Callable[[Sequence[dict[str, Any]]], str]

PROBES = ("~said {}~", '\n {}\n"é" \n', '{{"{}": [1, null]}}', "{}")
"""Contents that tell whether a template trims, quotes or changes what it is given."""
OTHER = {"name": "another", "tool_call_id": "zzzzzzzzz"}
READ = re.compile(
    r"""(?:startswith|endswith|split|replace|strip|find)\s*\(\s*(?P<a>'[^']+'|"[^"]+")|(?P<b>'[^']+'|"[^"]+")\s+(?:not\s+)?in\b"""
)
"""Texts that a template looks for in what it is given."""


def texts_read(template: str) -> tuple[str, ...]:
    """Returns the texts that a template looks for: a content that holds one may be written in another way."""
    found = {match["a"] or match["b"] for match in READ.finditer(template)}
    return tuple(sorted(text[1:-1] for text in found if text[1:-1].replace("\\n", "").strip()))


@dataclass(frozen=True)
class Around:
    """Holds what stands before, between and behind contents."""

    parts: tuple[str, ...]
    trims: bool
    """True if spaces around a content are left out."""

    def text(self, contents: Sequence[str]) -> str:
        given = [content.strip() for content in contents] if self.trims else contents
        return "".join(text for pair in zip(self.parts, [*given, ""], strict=True) for text in pair)


def around(messages: Sequence[dict[str, Any]], render: Render) -> Around | None:
    """Returns what a template writes around the contents of messages of these roles; None if contents, names or ids
    are not written as they are, so that each message has to be rendered."""
    first = asked(messages, PROBES[0])
    text, found = render(first), []
    for message in first:
        before, mark, text = text.partition(message["content"])
        if not mark:
            return None
        found.append(before)
    named = [{**message, **{key: OTHER[key] for key in OTHER if key in message}} for message in first]
    for trims in (False, True):
        way = Around((*found, text), trims)
        tried = [named, *(asked(messages, probe) for probe in PROBES[1:])]
        if all(render(others) == way.text([message["content"] for message in others]) for others in tried):
            return way
    return None


def asked(messages: Sequence[dict[str, Any]], probe: str) -> list[dict[str, Any]]:
    return [{**message, "content": probe.format(index)} for index, message in enumerate(messages)]
