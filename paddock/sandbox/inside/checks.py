"""Checks of a program: Python that calls its functions and asserts. They run in its PID 1, not in the program.

So a program that ends itself, or looks for what is expected of it, gains nothing: a check counts when it has run to
its end here.
"""

from __future__ import annotations

import builtins
import socket
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from .line import EXPECTED, Gone, Line
from .remote import named
from .wire import MODULE


def run(link: socket.socket, tests: dict[str, Any], tell: Callable[..., None]) -> None:
    """Tells `check=cause` for each check, in order, until the program is gone."""
    line = Line(link)
    module = ModuleType(MODULE)
    sys.modules[MODULE] = module
    space = module.__dict__
    space |= {"same": same, "accepted": accepted, "marked": marked, EXPECTED: line.expected}
    try:
        exec(compile(tests["setup"], "setup", "exec", dont_inherit=True), space)
        line.shared = set(space)
        codes = [compile(check, "check", "exec", dont_inherit=True) for check in tests["checks"]]
        _bind(line, set().union(*map(_used, codes)), tests["entry"], space)
        for code in codes:
            tell(check=_cause(code, space, line))
    except Gone:
        return
    except BaseException as error:
        tell(check=_named(error), detail=_text(error))


def _bind(line: Line, used: set[str], entry: str | None, space: dict[str, Any]) -> None:
    """Gives the checks what they use of the program's. Nothing that Python or the setup has: those are not the
    program's to define."""
    names = line.names()
    for name in names:
        if name in used and name not in space and not hasattr(builtins, name):
            space[name] = named(line.bound(name), name)
    if entry:
        method = entry not in names
        space["candidate"] = space[entry] = _method(line, entry) if method else line.bound(entry)


def _method(line: Line, name: str) -> Callable[..., Any]:
    """Returns a function that calls this method of a new `Solution` each time."""
    return lambda *args, **kwargs: line.call(name, args, kwargs)


def _used(code: CodeType) -> set[str]:
    """Names that a check may mean something of the program's by; attributes too, which do no harm."""
    inner = [_used(part) for part in code.co_consts if isinstance(part, CodeType)]
    return {*code.co_names}.union(*inner)


def _cause(check: CodeType, space: dict[str, Any], line: Line) -> str:
    try:
        exec(check, space)
    except Gone:
        raise
    except BaseException as error:
        cause = _named(error)
    else:
        cause = "ok"
    if line.gone:  # the check may have hidden it
        raise Gone
    return cause


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


def marked(value: Any) -> Any:
    """Returns the value with a text in the place of each NaN, which equals nothing: a row that expects one means it."""
    if isinstance(value, float) and value != value:
        return "\0NaN"
    if isinstance(value, list | tuple):
        return [marked(item) for item in value]
    return {key: marked(item) for key, item in value.items()} if isinstance(value, dict) else value
