"""Tools without an environment of their own: functions of files, and those that come with the package."""

from __future__ import annotations

import ast
import atexit
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paddock.config.rewards import PYTHON, address_parts
from paddock.core.registry import suggest
from paddock.environments.environment import Environment
from paddock.environments.tools import Tool, ToolError, is_tool, tool, tool_of
from paddock.errors import UserError
from paddock.facts.modules import user_module
from paddock.sandbox.program import Program, SandboxSettings

KEY = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
DIGITS = 12  # of a result that is not whole
LARGEST = 1e15  # of a power's result: larger ones take time and memory, and are nobody's question


class ToolEnvironment(Environment):
    """Lets the policy call tools until a turn calls none; it pays nothing itself."""

    calls_limited = False

    def __init__(self, tools: Sequence[Tool]):
        self.own = tools

    def tools(self) -> Sequence[Tool]:
        return self.own


def load_tools(
    paths: Sequence[str], sandbox: Callable[[], SandboxSettings], functions: Mapping[str, Callable[..., Any]]
) -> list[Tool]:
    """Returns the tools that the key names: files, functions of files, and those of this package by name.

    `sandbox` gives the settings of programs; `functions` are those of the program that made the run.
    """
    found: list[Tool] = []
    for path in paths:
        if path == INTERPRETER:
            found.append(interpreter(sandbox()))
        elif path in BUILT_IN:
            found.append(tool_of(BUILT_IN[path]))
        elif path.startswith(f"{PYTHON}:"):
            found.append(tool_of(functions[path.removeprefix(f"{PYTHON}:")]))
        else:
            found += tools_of_file(path)
    names = [one.name for one in found]
    if repeated := [name for name in names if names.count(name) > 1]:
        reason = f"two tools are both called {repeated[0]}, and a call names its tool"
        raise UserError(reason, key=KEY, value=list(paths), fix="@tool(name=...) for one of them")
    return found


def tools_of_file(path: str) -> list[Tool]:
    """Returns the functions of a file, or of a module `pkg://NAME`, that are marked as tools, or the one that
    FILE.py:NAME names."""
    file, name = address_parts(path)
    known = suggest(path, sorted([*BUILT_IN, INTERPRETER]))
    module = user_module(file, KEY, path, f"a Python file, or a tool by name: {known}")
    own = {key: value for key, value in vars(module).items() if callable(value)}
    if name is not None:
        if name not in own:
            raise UserError(f"has no function {name!r}", key=KEY, value=path, fix=suggest(name, sorted(own)))
        return [tool_of(own[name])]
    marked = [value for value in own.values() if is_tool(value)]
    if not marked:
        raise UserError("no function in it is marked as a tool", key=KEY, value=path, fix="@paddock.tool above each")
    return [tool_of(value) for value in marked]


@tool(inline=True)
def calculator(expression: str) -> float | int:
    """Computes an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, such as (3 + 4) * 2
    """
    try:
        value = computed(ast.parse(expression.replace(",", "").replace("^", "**"), mode="eval").body)
        if abs(value) == float("inf"):
            raise OverflowError("the number is too large")
        return shown(value)
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        raise ToolError(f"cannot read {expression!r:.80}: numbers, + - * / // % ** and parentheses") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ToolError(str(error)) from None


def shown(value: float | int) -> float | int:
    """Returns a number as a calculator shows it: 48 / 2 is 24, and 0.1 + 0.2 is 0.3."""
    rounded = float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
    return int(rounded) if rounded == int(rounded) and abs(rounded) < LARGEST else rounded


def computed(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](computed(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = computed(node.left), computed(node.right)
        if isinstance(node.op, ast.Pow):
            if abs(right) > 64 or abs(left) > LARGEST ** (1 / max(1, abs(right))):
                raise OverflowError("the power is too large")
            return left**right
        if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](left, right)
    raise ValueError("is no arithmetic")


INTERPRETER = "code_interpreter"
BUILT_IN: dict[str, Callable[..., Any]] = {"calculator": calculator}


def interpreter(sandbox: SandboxSettings) -> Tool:
    """Returns the tool that runs Python programs in the sandbox: without a network, and without the row's truth."""
    from paddock.sandbox.runner import runner_of

    runner = runner_of(sandbox, os.cpu_count() or 1)
    atexit.register(runner.close)

    @tool(name=INTERPRETER)
    def run(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: the whole program; each call starts anew
        """
        (result,) = runner.run_all([Program(code)])
        said = result.stdout + (f"\n{result.stderr}" if result.stderr else "")
        return said.strip() if result.passed else f"{said}\nerror: {result.cause} {result.detail}".strip()

    return tool_of(run)
