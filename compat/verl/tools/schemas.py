"""Schemas and responses of tools under verl's names."""

from __future__ import annotations

import json
from typing import Any

from verl._records import Record


class OpenAIFunctionPropertySchema(Record):
    """Describes an argument."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(Record):
    """Describes all arguments."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = []  # noqa: RUF012  # each record has a copy


class OpenAIFunctionSchema(Record):
    """Describes a function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema(type="object", properties={})
    strict: bool = False


class OpenAIFunctionToolSchema(Record):
    """Describes a tool, as chat templates take it."""

    type: str
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(Record):
    """Holds a call whose arguments are a JSON text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(Record):
    """Holds a call whose arguments were read."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Returns the call, and True if its arguments are no JSON object: it has none then."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except ValueError:
            arguments = None
        bad = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if bad else arguments), bad


class OpenAIFunctionToolCall(Record):
    """Holds a call with its id."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(Record):
    """Holds what a tool returned."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __init__(self, **given: Any):
        for name in ("image", "video"):
            if name in given and given[name] is not None and not isinstance(given[name], list):
                raise ValueError(f"{name} is a {type(given[name]).__name__}, not a list: {name}=[...]")
        super().__init__(**given)

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video
