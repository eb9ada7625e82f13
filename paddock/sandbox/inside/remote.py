"""The program's objects, as checks see them.

Two rules keep a program from judging itself:

* Whatever a check compares, it compares here, by plain values. A value that a check expects never travels to the
  program, and no `__eq__`, `__sub__`, `__lt__` or `__contains__` of the program's is asked about a plain value that a
  function returned an object for.
* The program's own operators are asked where the check itself says so: `==` between two objects of the program's, and
  any operator if the check wrote the name of the class (`Vector(1, 2) + Vector(3, 4) == Vector(4, 6)`, `5 in Tree()`).
  Only a name with a capital letter counts as one of a class, and the function under test never does. An `__eq__` that
  says yes to an object it cannot know is not believed.

Attributes, calls, items, lengths and texts of an object may be asked for freely: what comes back is judged here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from .wire import CHANGING

ARITHMETIC = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
)  # fmt: skip
ORDER = ("lt", "le", "gt", "ge")
ONE_BY_ONE, MOST_AT_ONCE = 64, 1024  # items of an iterator that are asked for singly, and later together


class Remote:
    """An object on the other side.

    `base` names the plain kind that it extends, if any; `name` is what the check called it by; `trusted`: the check
    itself named its class.
    """

    __slots__ = ("__base", "__line", "__name", "__number", "__trusted")

    def __init__(self, line: Any, number: int):
        for name, value in {"line": line, "number": number, "base": "", "name": "", "trusted": False}.items():
            object.__setattr__(self, f"_Remote__{name}", value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.__line.call(self, args, kwargs)
        return trusted(found) if self.__name else found

    def __getattr__(self, name: str) -> Any:
        found = self.__line.do("getattr", self, name)
        return named(found, name) if self.__trusted else found

    def __setattr__(self, name: str, value: Any) -> None:
        self.__line.do("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__line.do("delattr", self, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return CHANGING[self.__base] if self.__base else self.__line.do("class", self)

    def __instancecheck__(self, instance: Any) -> bool:
        return is_remote(instance) and self.__line.do("isinstance", instance, self) is True

    def __subclasscheck__(self, subclass: Any) -> bool:
        return is_remote(subclass) and self.__line.do("issubclass", subclass, self) is True

    def __eq__(self, other: Any) -> Any:
        if self is other:
            return True
        if self.__base:
            return plain_of(self) == plain_of(other)
        if not isinstance(other, Remote):
            return NotImplemented
        return self.__line.do("eq", self, other) is True and not self.__line.agrees_to_anything(self)

    def __ne__(self, other: Any) -> Any:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.__line.do("hash", self))

    def __contains__(self, item: Any) -> bool:
        if self.__trusted and not self.__base:
            return self.__line.do("contains", self, item) is True
        return item in plain_of(self) if self.__base else any(item is one or item == one for one in self)

    def __iter__(self) -> Iterator[Any]:
        found = self.__line.do("iter", self)
        return items_of(self.__line, found) if isinstance(found, Remote) else iter(found)

    def __next__(self) -> Any:
        for item in self.__line.next(self, 1)[0]:
            return item
        raise StopIteration

    def __enter__(self) -> Any:
        return self.__line.do("enter", self)

    def __exit__(self, kind: Any, error: Any, frames: Any) -> Any:
        return self.__line.do("exit", self, kind, error, None)

    def __await__(self) -> Any:
        return self.__line.do("await", self)
        yield

    def __deepcopy__(self, memo: Any) -> Any:
        return self if self.__line.looking_back else self.__line.do("deepcopy", self)

    def __copy__(self) -> Any:
        return self.__line.do("copy", self)

    def __dir__(self) -> Any:
        return self.__line.do("dir", self)


def is_remote(value: Any) -> bool:
    """Any of the program's objects, also one whose plain value is here."""
    return isinstance(value, Remote) or hasattr(type(value), "of_the_program")


def line_of(remote: Remote) -> Any:
    return object.__getattribute__(remote, "_Remote__line")


def number_of(remote: Remote) -> int:
    return int(object.__getattribute__(remote, "_Remote__number"))


def trusted(found: Any) -> Any:
    if isinstance(found, Remote):
        object.__setattr__(found, "_Remote__trusted", True)
    return found


def named(found: Any, name: str) -> Any:
    """The check wrote this name; see the rules above."""
    if isinstance(found, Remote) and name[:1].isupper():
        object.__setattr__(found, "_Remote__name", name)
        trusted(found)
    return found


def plain_of(value: Any) -> Any:
    """A copy of what a list, dictionary or set of the program's holds now."""
    if isinstance(value, Remote) and object.__getattribute__(value, "_Remote__base"):
        return line_of(value).do("plain", value)
    return value


def items_of(line: Any, iterator: Remote) -> Iterator[Any]:
    """Yields the items, fetched singly at first: the next one may take the program long, and not be wanted any more."""
    count = 0
    while True:
        wanted = 1 if count < ONE_BY_ONE else min(count, MOST_AT_ONCE)
        items, ended = line.next(iterator, wanted)
        yield from items
        count += len(items)
        if ended:
            return


def _unary(name: str, kind: Callable[[Any], Any] | None = None) -> Callable[[Remote], Any]:
    def method(self: Remote) -> Any:
        found = line_of(self).do(name, self)
        return kind(found) if kind else found

    return method


def _binary(name: str, reflected: bool) -> Callable[[Remote, Any], Any]:
    local: Callable[[Any, Any], Any] = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def method(self: Remote, other: Any) -> Any:
        if object.__getattribute__(self, "_Remote__base"):
            pair = plain_of(self), plain_of(other)
            return local(*(reversed(pair) if reflected else pair))
        allowed = any(
            isinstance(one, Remote) and object.__getattribute__(one, "_Remote__trusted") for one in (self, other)
        )
        if not allowed:
            return NotImplemented
        return trusted(line_of(self).do(name, *((other, self) if reflected else (self, other))))

    return method


def _equip() -> None:
    """Methods that Python looks for in the class alone."""
    for name in (*ARITHMETIC, *ORDER):
        setattr(Remote, f"__{name}__", _binary(name, reflected=False))
    for name in ARITHMETIC:
        setattr(Remote, f"__r{name}__", _binary(name, reflected=True))
    kinds: dict[str, Callable[[Any], Any] | None] = {
        "bool": bool, "len": int, "str": str, "repr": str, "int": int, "float": float, "index": int, "complex": complex,
        "neg": None, "pos": None, "abs": None, "invert": None, "reversed": None,
    }  # fmt: skip
    for name, kind in kinds.items():
        setattr(Remote, f"__{name}__", _unary(name, kind))
    for name in ("getitem", "setitem", "delitem", "round", "format"):
        setattr(Remote, f"__{name}__", lambda self, *operands, _name=name: line_of(self).do(_name, self, *operands))


_equip()


class Valued:
    """A number, text or tuple of a class of the program's: its plain value is here, all else is asked for."""

    of_the_program: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["of_the_program"], name)

    def __str__(self) -> str:
        return str(vars(self)["of_the_program"])

    def __repr__(self) -> str:
        return repr(vars(self)["of_the_program"])

    def __format__(self, how: str) -> str:
        return format(vars(self)["of_the_program"], how)


class Raised:
    """An exception of a class of the program's. Checks that name the class can catch it, and look at it."""

    of_the_program: Any = None
    line: Any
    number: int

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args)
        self.of_the_program = self.line.call(self.line.remote(self.number), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["of_the_program"], name)

    def __str__(self) -> str:
        return str(vars(self)["of_the_program"])
