"""Readers of tool calls under verl's names; the formats are `paddock.environments.calls`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from paddock.environments.calls import format_of
from verl._records import Record

Parser = TypeVar("Parser", bound=type)


class FunctionCall(Record):
    """Holds a call as the model wrote it."""

    arguments: str
    name: str
    tool_call_id: str | None = None


class ToolParser:
    """Reads tool calls in the format that `multi_turn.format` or the chat template names; subclasses read others."""

    _registry: ClassVar[dict[str, Any]] = {}

    def __init__(self, tokenizer: Any, name: str | None = None):
        self.tokenizer, self.name = tokenizer, name

    @property
    def stop_token_ids(self) -> list[int]:
        return []

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        """Returns the turn's text, and the calls in it; those that cannot be read are left out."""
        format = format_of(self.name, self.tokenizer.chat_template)
        calls, _ = format.parse(self.tokenizer.decode(responses_ids, skip_special_tokens=False))
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        return text, [
            FunctionCall(name=call.name, arguments=json.dumps(dict(call.arguments), ensure_ascii=False),
                         tool_call_id=call.id or None) for call in calls
        ]  # fmt: skip

    @classmethod
    def get_tool_parser(cls, name: str | None, tokenizer: Any) -> Any:
        return cls._registry[name](tokenizer) if name in cls._registry else ToolParser(tokenizer, name)

    @classmethod
    def register(cls, name: str) -> Callable[[Parser], Parser]:
        def file(parser: Parser) -> Parser:
            cls._registry[name] = parser
            return parser

        return file
