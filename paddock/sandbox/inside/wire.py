"""How checks and program talk: questions are pickles, answers are JSON, out of which only plain values can come.

What a program returns is judged by another process. Numbers, texts and containers travel as copies of their plain
kind, so no method of the program's own is ever called by a check: an `__eq__` that always says yes says it to nobody.
Any other object stays where it is and is known by its number; remote.py says what a check can do with it. Answers are
not pickles, which can change classes of the one who reads them.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any

MODULE = "solution"
"""The program's module, on both sides. Not `__main__`: what stands under `if __name__ == "__main__"` is no part of
it."""
LIBRARY = (
    "math", "cmath", "collections", "itertools", "functools", "operator", "string", "re", "json", "copy", "heapq",
    "bisect", "random", "statistics", "datetime", "decimal", "fractions", "typing", "dataclasses", "enum", "abc",
    "io", "contextlib", "asyncio", "time", "array",
)  # fmt: skip
"""Modules that a check may have of the program's imports: its own copy of them, not the program's."""
SEQUENCES: dict[Any, str] = {
    list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque",
    type({}.keys()): "keys", type({}.values()): "values",
}  # fmt: skip
"""How a value is written: JSON's own as it is, any other as `[kind, ...]`."""
MAPPINGS: dict[Any, str] = {
    defaultdict: "dict", dict: "dict", Counter: "Counter", OrderedDict: "OrderedDict", type({}.items()): "items",
}  # fmt: skip
ATOMS: dict[type, tuple[str, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    bytes: ("bytes", lambda value: [value.hex()], bytes.fromhex),
    bytearray: ("bytearray", lambda value: [value.hex()], bytearray.fromhex),
    complex: ("complex", lambda value: [value.real, value.imag], complex),
    range: (
        "range", lambda value: [hex(part) for part in (value.start, value.stop, value.step)],
        lambda *parts: range(*(int(part, 16) for part in parts)),
    ),
    Fraction: (
        "Fraction", lambda value: [hex(value.numerator), hex(value.denominator)],
        lambda *parts: Fraction(*(int(part, 16) for part in parts)),
    ),
    Decimal: ("Decimal", lambda value: [str(value)], Decimal),
    datetime: ("datetime", lambda value: [value.isoformat()], datetime.fromisoformat),
    date: ("date", lambda value: [value.isoformat()], date.fromisoformat),
    time: ("time", lambda value: [value.isoformat()], time.fromisoformat),
    timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds], timedelta),
}  # fmt: skip
"""Kinds with a name, what is written of a value, and what makes a value of it."""
READERS: dict[str, Callable[..., Any]] = {
    **{name: kind for kind, name in (SEQUENCES | MAPPINGS).items()},
    **{name: make for name, _, make in ATOMS.values()},
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "Counter": lambda pairs: Counter(dict(pairs)),
    "items": lambda pairs: dict(pairs).items(),
    "int": lambda digits: int(digits, 16),  # as decimals Python limits their length
}
IN_PLACE = (list, dict, set, bytearray, deque, OrderedDict, Counter, defaultdict)
SIMPLE = frozenset((int, float, str, bool, type(None), bytes, complex, range))
UNCHANGING: tuple[Any, ...] = (int, float, complex, str, bytes, tuple, frozenset)
CHANGING: dict[str, type] = {"list": list, "dict": dict, "set": set, "bytearray": bytearray, "deque": deque}
"""Plain kinds whose subclasses a program may define: copies of the former stay true, those of the latter do not."""
SMALL = 1 << 53


class Kept(list[Any]):
    """The program's objects that the checks know, by number."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, int] = {}
        self.arguments: dict[int, int] = {}
        """While changed arguments are written: where each of them was found, so that one inside another is named."""

    def place(self, value: Any) -> int:
        if id(value) not in self.places:
            self.places[id(value)] = len(self)
            self.append(value)
        return self.places[id(value)]


async def awaited(value: Any) -> Any:
    return await value


class Foreign:
    """On the program's side: an object of the checks. `program` talks to its owner; see serve.py."""


def written(value: Any, kept: Any) -> Any:
    """Writes a value as JSON, on the program's side; its objects by their number in `kept`."""
    kind: Any = type(value)
    if kind is str or kind is float or kind is bool or value is None:
        return value
    if kind is int:
        return value if -SMALL < value < SMALL else ["int", hex(value)]
    if getattr(kept, "arguments", None) and id(value) in kept.arguments:
        return ["argument", kept.arguments[id(value)]]
    if kind in SEQUENCES:
        return [SEQUENCES[kind], [written(item, kept) for item in list(value)]]
    if kind in MAPPINGS:
        pairs = value if kind is type({}.items()) else value.items()
        return [MAPPINGS[kind], [[written(key, kept), written(item, kept)] for key, item in pairs]]
    if kind in ATOMS:
        name, parts, _ = ATOMS[kind]
        return [name, *parts(value)]
    return _object(value, kept)


def _object(value: Any, kept: Kept) -> Any:
    """Writes a value that has no plain kind, or extends one."""
    if isinstance(value, Foreign):
        return ["local", value.number]  # type: ignore[attr-defined]
    if isinstance(value, type):
        return _class(value, kept)
    for base in UNCHANGING:
        if isinstance(value, base):
            return ["valued", kept.place(value), written(plain(value, base), kept)]
    for name, base in CHANGING.items():
        if isinstance(value, base):
            return ["object", kept.place(value), name]
    for base, (name, parts, _) in ATOMS.items():
        if isinstance(value, base):
            return [name, *parts(value)]
    return ["object", kept.place(value), "coroutine" if inspect.iscoroutine(value) else ""]


def _class(value: type, kept: Kept) -> list[Any]:
    if getattr(builtins, value.__name__, None) is value:
        return ["builtin", value.__name__]
    if issubclass(value, BaseException):
        return ["error class", kept.place(value), [_ancestor(base, kept) for base in value.__mro__]]
    return ["object", kept.place(value), ""]


def plain(value: Any, base: Any) -> Any:
    """A copy of the plain kind that a subclass extends, whatever the subclass says of itself."""
    if base in (int, float, str):
        return {int: int.__int__, float: float.__float__, str: str.__str__}[base](value)
    if base is dict:
        return dict(value.items())
    return base(value)


def _ancestor(base: type, kept: Kept) -> list[Any]:
    own = getattr(builtins, base.__name__, None) is not base
    return [base.__name__, kept.place(base) if own else None]


def library_name(value: Any) -> list[str] | None:
    """The program's side: where the standard library has this, so that a check can take its own."""
    if isinstance(value, ModuleType):
        return [value.__name__, ""]
    module, name = getattr(value, "__module__", MODULE), getattr(value, "__qualname__", None)
    if module == MODULE or not isinstance(name, str):
        return None
    for place in (module, *LIBRARY):
        if place in LIBRARY and getattr(sys.modules.get(place), name, None) is value:
            return [place, name]
    return None


def from_library(module: str, name: str) -> Any:
    """Returns a name of the standard library, on the checks' side."""
    if module not in LIBRARY:
        raise NameError(f"{module} is no module that checks can have of a program")
    __import__(module)
    return getattr(sys.modules[module], name) if name else sys.modules[module]


def read(value: Any, line: Any) -> Any:
    """Reads a value on the checks' side; `line` makes what is no plain value."""
    if not isinstance(value, list):
        return value
    kind, *parts = value
    if kind in READERS:
        if kind in MAPPINGS.values():
            return READERS[kind]([(read(key, line), read(item, line)) for key, item in parts[0]])
        if kind in SEQUENCES.values():
            return READERS[kind]([read(item, line) for item in parts[0]])
        return READERS[kind](*parts)
    if kind == "builtin":
        found = getattr(builtins, parts[0])
        if not isinstance(found, type):
            raise ValueError(parts[0])
        return found
    return line.made(kind, *parts)


def containers(args: tuple[Any, ...], kwargs: dict[str, Any], by_value: Callable[[Any], bool]) -> list[Any]:
    """Lists what of these a call can change in place, in an order that is the same on both sides.

    `by_value` tells whether an instance of a class of the module MODULE travelled as a copy.
    """
    waiting = [value for value in (*args, *kwargs.values()) if type(value) not in SIMPLE]
    if not waiting:
        return []
    found: list[Any] = []
    seen: set[int] = set()
    while waiting:
        value = waiting.pop()
        kind = type(value)
        instance = kind.__module__ == MODULE and by_value(value)
        if not (kind is tuple or kind in IN_PLACE or instance) or id(value) in seen:
            continue
        seen.add(id(value))
        if kind is not tuple:
            found.append(value)
        waiting += [item for item in _items(value, instance) if type(item) not in SIMPLE]
    return found


def _items(value: Any, instance: bool) -> Iterable[Any]:
    if instance:
        return vars(value).values()
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | deque) else ()


def content(container: Any) -> Any:
    """Returns a copy of the outermost level."""
    kind = type(container)
    if kind is list:
        return container.copy()
    if isinstance(container, dict):
        return list(container.items())
    if isinstance(container, list | set | deque):
        return list(container)
    return bytes(container) if kind is bytearray else list(vars(container).items())


def same_content(before: Any, now: Any) -> bool:
    """Compares what `content` returned. Objects whose `__eq__` fails are taken for changed."""
    try:
        return bool(before == now)
    except Exception:
        return False


def fill(container: Any, found: Any) -> None:
    """Puts another content into it."""
    if isinstance(container, bytearray):
        container[:] = found
        return
    target = container if isinstance(container, list | dict | set | deque) else vars(container)
    target.clear()
    if isinstance(target, dict):
        for key, item in found:
            target[key] = item
    else:
        target.extend(found) if isinstance(target, list | deque) else target.update(found)
