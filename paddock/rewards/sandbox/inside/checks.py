"""Checks of a program: Python that calls its functions and asserts. They run in the warden, not in the program.

So a program that ends itself, or looks for what is expected of it, gains nothing: a check counts when it has run to
its end here.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .wire import Question, read

MODULE = "solution"
"""The module's name on both sides. Not `__main__`: what stands under `if __name__ == "__main__"` is no part of it."""


ENDINGS = (StopIteration, StopAsyncIteration)


class Gone(Exception):
    """The program has ended, or talks nonsense."""


class Line:
    """Questions to the program."""

    def __init__(self, link: socket.socket):
        self.reader, self.writer = link.makefile("rb"), link.makefile("wb")

    def ask(self, *question: Any) -> Any:
        whole = io.BytesIO()
        Question(whole).dump(question)
        try:
            self.writer.write(whole.getbuffer())
            self.writer.flush()
        except OSError as error:
            raise Gone from error
        return self.answer()

    def answer(self) -> Any:
        try:
            kind, value = json.loads(self.reader.readline())
            value = read(value, self)
        except Exception as error:
            raise Gone from error
        if kind == "raised":
            raise _error(value)
        return value


def _error(raised: Any) -> Exception:
    """As the program raised it. But not what ends a loop: `all(map(candidate, ...))` would take it for the end."""
    name, text = raised if isinstance(raised, tuple) and len(raised) == 2 else ("RuntimeError", raised)
    kind = getattr(builtins, str(name), None)
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, ENDINGS):
        kind = RuntimeError
    try:
        return kind(text)
    except TypeError:  # it wants more than a text
        return RuntimeError(f"{name}: {text}")


def run(link: socket.socket, tests: dict[str, Any], tell: Callable[..., None]) -> None:
    """Tells `check=cause` for each check, in order, until the program is gone."""
    line = Line(link)
    module = ModuleType(MODULE)
    sys.modules[MODULE] = module
    space = module.__dict__
    space |= {"same": same, "accepted": accepted}
    try:
        exec(compile(tests["setup"], "setup", "exec", dont_inherit=True), space)
        names = line.answer()
        for name, function in _asked(tests, names, space).items():
            space[name] = _proxy(line, function)
        for check in tests["checks"]:
            tell(check=_cause(check, space))
    except Gone:
        return
    except BaseException as error:
        tell(check=_named(error), detail=_text(error))


def _asked(tests: dict[str, Any], names: list[str], space: dict[str, Any]) -> dict[str, str]:
    """Names in the checks -> functions of the program. None that Python or the setup has: those are not its own to
    define."""
    entry = tests["entry"]
    if entry:
        return {"candidate": entry, entry: entry}
    used = {node.id for check in tests["checks"] for node in ast.walk(ast.parse(check)) if isinstance(node, ast.Name)}
    return {name: name for name in names if name in used and name not in space and not hasattr(builtins, name)}


def _proxy(line: Line, function: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: line.ask("call", function, args, kwargs)


def _cause(check: str, space: dict[str, Any]) -> str:
    try:
        exec(compile(check, "check", "exec", dont_inherit=True), space)
    except Gone:
        raise
    except BaseException as error:
        return _named(error)
    return "ok"


def _named(error: BaseException) -> str:
    return "wrong" if isinstance(error, AssertionError) else "memory" if isinstance(error, MemoryError) else "error"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def same(output: Any, expected: Any) -> bool:
    """Equal as data sets mean it: lists and tuples alike, numbers to six digits, keys as JSON has them."""
    import math

    if isinstance(output, list | tuple) and isinstance(expected, list | tuple):
        return len(output) == len(expected) and all(map(same, output, expected))
    if isinstance(output, dict) and isinstance(expected, dict):
        output, expected = ({str(key): value for key, value in part.items()} for part in (output, expected))
        return output.keys() == expected.keys() and all(same(output[key], expected[key]) for key in expected)
    if (
        isinstance(output, int | float)
        and isinstance(expected, int | float)
        and float in (type(output), type(expected))
    ):
        return math.isclose(output, expected, rel_tol=1e-6, abs_tol=1e-9)
    return bool(output == expected)


def accepted(output: Any, expected: Any) -> bool:
    """Some data sets wrap what is expected in a list of one."""
    return same(output, expected) or (isinstance(expected, list) and len(expected) == 1 and same(output, expected[0]))
