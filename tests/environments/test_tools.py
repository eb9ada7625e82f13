"""Tools: schemas from types and docstrings, functions of files, and those that come with the package."""

from __future__ import annotations

import enum
import os
import time
from typing import Annotated, Any, Literal

import pytest
from transformers.utils import get_json_schema

import paddock
from paddock.environments.tool_environment import calculator, load_tools
from paddock.environments.tools import Tool, ToolError, tool_of, written
from paddock.errors import UserError
from paddock.sandbox.program import default_settings


def loaded(*paths: str, **functions: Any) -> list[Tool]:
    return load_tools(paths, default_settings, functions)


def book(title: str, pages: int, price: float = 1.5, tags: list[str] | None = None, kind: Literal["a", "b"] = "a"):
    """Books a thing.

    Args:
        title: what it is called
        pages: how many there are,
            and more on another line
        price: what it costs
        tags: words about it
        kind: one of two

    Returns:
        nothing
    """


def test_a_schema_is_that_of_transformers_where_it_has_one():
    ours, theirs = tool_of(book).schema(), get_json_schema(book)
    assert ours["function"]["name"] == theirs["function"]["name"]
    assert ours["function"]["description"] == theirs["function"]["description"]
    mine, other = (one["function"]["parameters"] for one in (ours, theirs))
    assert mine["required"] == other["required"]
    for name, expected in other["properties"].items():
        own = {key: value for key, value in mine["properties"][name].items() if key != "default"}
        assert own == expected, name


def test_types_beyond_those_have_schemas_too():
    class Colour(enum.Enum):
        RED = "red"
        BLUE = "blue"

    def paint(colour: Colour, where: Annotated[str, "a wall"], size: int | float, more: dict[str, int], any: Any): ...

    paint.__annotations__ |= {"colour": Colour, "where": Annotated[str, "a wall"]}
    found = tool_of(paint).parameters["properties"]
    assert found["colour"] == {"type": "string", "enum": ["red", "blue"]}
    assert found["where"] == {"type": "string", "description": "a wall"}
    assert found["size"] == {"anyOf": [{"type": "integer"}, {"type": "number"}]}
    assert found["more"] == {"type": "object", "additionalProperties": {"type": "integer"}} and found["any"] == {}


def test_an_argument_without_a_type_is_refused_by_name():
    def add(a, b: int): ...

    with pytest.raises(UserError, match=r"tool=add: the argument 'a' has no type"):
        tool_of(add)


def test_methods_of_an_environment_are_tools_in_their_order_and_a_name_may_be_given():
    class Shop(paddock.Environment):
        @paddock.tool(name="buy_now", description="Buys.")
        def buy(self, what: str) -> str:
            return what

        @paddock.tool
        def ask(self) -> str:
            """Asks."""
            return ""

    assert [(tool.name, tool.description) for tool in Shop().tools()] == [("buy_now", "Buys."), ("ask", "Asks.")]
    assert Shop().tools()[0].function(what="x") == "x"


@pytest.mark.parametrize(
    ("said", "value"),
    [("2+3*4", 14), ("(1,200 - 200)/4", 250.0), ("2^10", 1024), ("-7 // 2", -4), ("10 % 4", 2), ("+.5", 0.5)],
)
def test_the_calculator_computes(said, value):
    assert calculator(said) == value


@pytest.mark.parametrize(("said", "shown"), [("48 / 2", "24"), ("0.1 + 0.2", "0.3"), ("1 / 3", "0.333333333333"),
                                             ("-6 * .5", "-3")])  # fmt: skip
def test_the_calculator_shows_a_result_as_people_write_it(said, shown):
    assert written(calculator(said)) == shown


@pytest.mark.parametrize(
    "said",
    ["", "1/0", "9**9**9", "2**-99999", "abs(1)", "a+1", "1 if 1 else 2", "'a'*9", "(" * 999, "10**99", "1e400*9"],
)
def test_the_calculator_refuses_the_rest_at_once(said):
    begun = time.monotonic()
    with pytest.raises(ToolError):
        calculator(said)
    assert time.monotonic() - begun < 1


def test_functions_of_files_are_found_by_their_mark_or_by_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import paddock\n@paddock.tool\ndef one(a: int) -> int:\n    '''One.'''\n    return a\n"
        "def two(a: int) -> int:\n    '''Two.'''\n    return 2 * a\n"
    )
    assert [tool.name for tool in loaded(str(file))] == ["one"]
    assert [tool.name for tool in loaded(f"{file}:two", "calculator")] == ["two", "calculator"]
    assert loaded("python:three", three=lambda: 3)[0].function() == 3
    with pytest.raises(UserError, match=r"function_tool_path=.*has no function 'three'"):
        loaded(f"{file}:three")
    with pytest.raises(UserError, match="two tools are both called one"):
        loaded(str(file), f"{file}:one")
    file.write_text("def two(a: int) -> int: ...\n")
    with pytest.raises(UserError, match="no function in it is marked as a tool"):
        loaded(str(file))
    with pytest.raises(UserError, match=r"there is no such file(.|\n)*calculator"):
        loaded("calculater")


def test_python_runs_in_the_sandbox_without_the_network_and_without_this_process():
    (run,) = loaded("code_interpreter")
    assert run.name == "code_interpreter" and run.parameters["required"] == ["code"]
    assert run.function(code="print(6 * 7)") == "42"
    assert "ZeroDivisionError" in run.function(code="1/0")
    os.environ["PADDOCK_TEST_TRUTH"] = "1776"
    try:
        said = run.function(code="import os; print(os.environ.get('PADDOCK_TEST_TRUTH'), os.getppid())")
    finally:
        del os.environ["PADDOCK_TEST_TRUTH"]
    assert "1776" not in said and str(os.getpid()) not in said
    assert "error" in run.function(code="import socket; socket.create_connection(('127.0.0.1', 9))")


def test_a_default_is_told_as_json_has_it_and_left_out_if_json_has_none():
    class Unit(enum.Enum):
        KM = "km"

    def far(unit: Unit = Unit.KM, sides: tuple[int, ...] = (1, 2), name: str | object = object()) -> str:
        return unit.value

    far.__annotations__ = {"unit": Unit, "sides": list[int], "name": str}
    told = tool_of(far).parameters["properties"]
    assert told["unit"] == {"type": "string", "enum": ["km"], "default": "km"} and type(told["unit"]["default"]) is str
    assert told["sides"]["default"] == [1, 2] and "default" not in told["name"]


def test_an_argument_of_many_brackets_is_told_to_be_wrong():
    def add(a: int, b: list[int]) -> int:
        return a + len(b)

    for name, other in (("a", {"b": []}), ("b", {"a": 1})):
        with pytest.raises(ToolError, match="not of type"):
            tool_of(add).arguments({name: "[" * 100_000, **other})
