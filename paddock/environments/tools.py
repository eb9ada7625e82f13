"""Tools: Python functions that the policy may call, with a JSON schema from their types and docstring."""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar, Union, overload

from paddock.errors import UserError

MARK, SCHEMA, INLINE = "__paddock_tool__", "__paddock_schema__", "__paddock_inline__"
"""Attributes of a function that is a tool: its name and description, a schema if its types are not to give one, and
whether it returns at once."""
F = TypeVar("F", bound=Callable[..., Any])
Schema = dict[str, Any]

KINDS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
                         tuple: "array", type(None): "null"}  # fmt: skip
SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Examples?|Yields|Notes?)\s*:\s*$")
ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


class ToolError(Exception):
    """Raised by a tool to tell the policy what went wrong; any other exception is told as well.

    >>> import paddock
    >>> @paddock.tool
    ... def capital(country: str) -> str:
    ...     \"\"\"Returns the capital of a country.\"\"\"
    ...     if country != "France":
    ...         raise paddock.ToolError(f"no country {country} is known")
    ...     return "Paris"
    >>> capital("France")
    'Paris'
    """


@dataclass(frozen=True)
class ToolFailure:
    """Says why a call has no result."""

    reason: str
    kind: str = ""
    """Type of the exception, if it says something."""

    def __str__(self) -> str:
        return f"error: {self.kind}: {self.reason}" if self.kind else f"error: {self.reason}"


@dataclass(frozen=True)
class Tool:
    """Holds a function that the policy may call, under a name and with a schema of its arguments."""

    name: str
    description: str
    parameters: Schema
    """JSON schema of the arguments."""
    function: Callable[..., Any]
    """Called with the arguments by name; may be a coroutine function."""

    @property
    def inline(self) -> bool:
        """True if a call returns at once, so it needs no thread: marked so, or a method of an environment that is."""
        owner = getattr(self.function, "__self__", None)
        return getattr(self.function, INLINE, False) or getattr(owner, "inline", False) is True

    def schema(self) -> Schema:
        """Returns the tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call, converted to their types; a ToolError says which one does not fit."""
        known = self.parameters.get("properties", {})
        if self.parameters.get("additionalProperties", False) is False and (
            unknown := [name for name in given if name not in known]
        ):
            raise ToolError(f"{self.name} has no argument {unknown[0]!r}; it has {sorted(known)}")
        if missing := [name for name in self.parameters.get("required", ()) if name not in given]:
            raise ToolError(f"{self.name} lacks the argument {missing[0]!r}")
        return {name: converted(value, known.get(name, {}), name) for name, value in given.items()}

    def typed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call, converted where they fit their types."""
        known, found = self.parameters.get("properties", {}), dict(given)
        for name, value in given.items():
            with suppress(ToolError):
                found[name] = converted(value, known.get(name, {}), name)
        return found


@overload
def tool(function: F) -> F: ...
@overload
def tool(*, name: str | None = None, description: str | None = None, inline: bool = False) -> Callable[[F], F]: ...
def tool(function: Any = None, *, name: str | None = None, description: str | None = None, inline: bool = False) -> Any:
    """Marks a function, or a method of an environment, as a tool. Its schema comes from types and docstring.

    `inline`: it returns at once, so it is called between two decode steps; others run in threads.

    >>> import paddock
    >>> @paddock.tool
    ... def add(a: int, b: int) -> int:
    ...     \"\"\"Adds two numbers.\"\"\"
    ...     return a + b
    >>> add(2, 3)
    5
    """

    def mark(marked: Any) -> Any:
        setattr(marked, MARK, (name, description))
        setattr(marked, INLINE, inline)
        return marked

    return mark if function is None else mark(function)


def is_tool(thing: Any) -> bool:
    return hasattr(thing, MARK)


def tools_of(owner: Any) -> list[Tool]:
    """Returns the tools among the methods of an object, in the order in which its class defines them."""
    names = dict.fromkeys(name for kind in reversed(type(owner).__mro__) for name in vars(kind))
    marked = [name for name in names if is_tool(getattr(type(owner), name, None))]
    return [tool_of(getattr(owner, name)) for name in marked]


def tool_of(function: Callable[..., Any]) -> Tool:
    """Returns a function as a tool: its name, its docstring's first part, and a schema of its arguments."""
    return Tool(*described(getattr(function, "__func__", function)), function)


@lru_cache(maxsize=1024)
def described(function: Callable[..., Any]) -> tuple[str, str, Schema]:
    """Returns a tool's name, description and schema: read once, for every episode has an object of its own."""
    if given := getattr(function, SCHEMA, None):
        return str(given["name"]), str(given.get("description", "")), dict(given.get("parameters") or {})
    named, said = getattr(function, MARK, (None, None))
    name = str(named or getattr(function, "__name__", type(function).__name__))
    first, arguments = docstring_parts(inspect.getdoc(function) or "")
    return name, said or first, parameters_of(function, name, arguments)


def parameters_of(function: Callable[..., Any], name: str, described: Mapping[str, str]) -> Schema:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UserError(
            f"a type of the tool cannot be found: {error}", key="tool", value=name, fix="import it"
        ) from None
    properties: dict[str, Schema] = {}
    required = []
    for argument in inspect.signature(function).parameters.values():
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD) or argument.name in ("self", "cls"):
            continue
        if argument.name not in hints:
            fix = f"def {name}({argument.name}: int, ...): models are told the types"
            raise UserError(f"the argument {argument.name!r} has no type", key="tool", value=name, fix=fix)
        found = schema_of(hints[argument.name], name)
        if argument.name in described:
            found = {**found, "description": described[argument.name]}
        if argument.default is argument.empty:
            required.append(argument.name)
        elif (default := written_default(argument.default)) is not None:
            found = {**found, "default": default}
        properties[argument.name] = found
    return {"type": "object", "properties": properties, "required": required}


def written_default(value: Any) -> Any:
    """Returns a default as JSON has it: templates write schemas, and checkpoints keep them. None: it cannot be told."""
    try:
        return json.loads(json.dumps(value.value if isinstance(value, enum.Enum) else value))
    except (TypeError, ValueError):
        return None


def schema_of(hint: Any, name: str) -> Schema:
    """Returns the JSON schema of a type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty:
        return {}
    if origin is Literal:
        return {"type": KINDS.get(type(inner[0]), "string"), "enum": list(inner)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
        return {"type": KINDS.get(type(values[0]), "string"), "enum": values}
    if origin in (Union, types.UnionType):
        kinds = [schema_of(one, name) for one in inner if one is not type(None)]
        found = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return {**found, "nullable": True} if type(None) in inner else found
    if origin is typing.Annotated:
        said = next((one for one in inner[1:] if isinstance(one, str)), None)
        return schema_of(inner[0], name) | ({"description": said} if said else {})
    base = origin or hint
    if base in (list, tuple, set, Sequence) or (
        isinstance(base, type) and issubclass(base, Sequence) and base is not str
    ):
        return {"type": "array"} | ({"items": schema_of(inner[0], name)} if inner else {})
    if base is dict or (isinstance(base, type) and issubclass(base, Mapping)):
        return {"type": "object"} | ({"additionalProperties": schema_of(inner[1], name)} if len(inner) == 2 else {})
    if base in KINDS:
        return {"type": KINDS[base]}
    fix = "use str, int, float, bool, list, dict, Literal, an Enum, or a union of these"
    raise UserError(f"the type {hint!r} has no JSON schema", key="tool", value=name, fix=fix)


def docstring_parts(text: str) -> tuple[str, dict[str, str]]:
    """Returns a docstring's description, and what its section `Args:` says of each argument."""
    described: dict[str, str] = {}
    lines: list[str] = []
    section, current, depth = "", "", 0
    for line in text.splitlines():
        if heading := SECTION.match(line):
            section, current = heading[1], ""
        elif not section:
            lines.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            indent = len(line) - len(line.lstrip())
            found = ARGUMENT.match(line)
            if found and (not current or indent <= depth):
                current, depth = found[1], indent
                described[current] = found[2].strip()
            elif current:
                described[current] = f"{described[current]} {line.strip()}".strip()
    return "\n".join(lines).strip(), described


def converted(value: Any, schema: Schema, name: str) -> Any:
    """Returns a value as its schema asks for it. Texts are read as numbers, lists and objects: models quote them."""
    kind = schema.get("type")
    if value is None and (schema.get("nullable") or kind in (None, "null")):
        return None
    if isinstance(value, str) and kind in ("integer", "number", "boolean", "array", "object"):
        try:
            value = json.loads(value.strip().lower() if kind == "boolean" else value)
        except (ValueError, RecursionError):
            raise ToolError(f"{name} is {value!r:.80}, not of type {kind}") from None
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind == "number" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    expected: Any = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list | tuple,
                     "object": Mapping}.get(str(kind))  # fmt: skip
    wrong = expected is not None and not isinstance(value, expected)
    if wrong or (kind in ("integer", "number") and isinstance(value, bool)):
        raise ToolError(f"{name} is {value!r:.80}, not of type {kind}")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{name} is {value!r:.80}, not one of {schema['enum']}")
    return value


def written(result: Any) -> str:
    """Returns what a tool returned as the text that the policy reads."""
    if isinstance(result, str | ToolFailure):
        return str(result)
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
