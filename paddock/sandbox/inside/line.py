"""The checks' end of the line to a program: asks questions, and meanwhile answers for what was passed as an argument.

A program may call functions that a check gave it, read public attributes of objects that a check gave it, and set
them. It reaches nothing else here: no attribute of a function, none that begins with an underscore, no frame, no
module.
"""

from __future__ import annotations

import builtins
import copy
import io
import json
import operator
import pickle
import socket
from collections.abc import Callable
from types import BuiltinMethodType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from .remote import Raised, Remote, Valued, is_remote, number_of
from .wire import MODULE, UNCHANGING, awaited, containers, content, fill, from_library, read

EXPECTED = "__expected__"
"""The function that checks call where they say what they expect, with the expression as a function; see oracle.py."""
ENDINGS = (StopIteration, StopAsyncIteration, GeneratorExit)
VALUED: dict[type, Any] = {base: type(f"Valued_{base.__name__}", (Valued, base), {}) for base in UNCHANGING}
FROM_OBJECTS: dict[str, Callable[..., Any]] = {
    "len": len, "bool": bool, "str": str, "iter": iter, "hash": hash,
    "getitem": operator.getitem, "eq": operator.eq, "lt": operator.lt, "contains": operator.contains,
}  # fmt: skip
"""Operations that a program may do with an object of a check's own class, beside its public attributes."""


class Gone(BaseException):
    """The program has ended, or talks nonsense. No `except Exception` of a check may hide it."""


def kept_object(number: int) -> Any:
    """Stands in a question for an object of the program's, which has it under this number; see serve.py."""
    raise NotImplementedError


def foreign_object(number: int) -> Any:
    """Stands in a question for an object of the checks."""
    raise NotImplementedError


class Question(pickle.Pickler):
    """Pickles plain values by value, classes and functions of the standard library and of the setup by name, and the
    program's own objects by number. Objects that belong to the checks alone stay here, and go by a number too."""

    def __init__(self, file: Any, line: Line):
        super().__init__(file)
        self.line = line

    def reducer_override(self, value: Any) -> Any:
        number = self.line.number_of(value)
        if number is not None:
            return kept_object, (number,)
        if self.line.stays(value):
            return foreign_object, (self.line.place(value),)
        return NotImplemented


class Line:
    """Questions to the program. `shared` are the names that both sides have from the setup."""

    def __init__(self, link: socket.socket):
        self.reader, self.writer = link.makefile("rb"), link.makefile("wb")
        self.shared: set[str] = set()
        self.gone = False
        self.looking_back = self.binding = False
        self.functions: dict[str, int] = {}
        self.remotes: dict[int, Remote] = {}
        self.errors: dict[int, Any] = {}
        self.locals: list[Any] = []
        self.before: dict[int, tuple[Any, Any]] = {}
        """Arguments of functions that have changed some of them: the object, and what it held before."""

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result; arguments that the program changed in place are changed here too."""
        subject = number_of(function) if type(function) is Remote else function
        return self._asked(("call", subject, args, kwargs), containers(args, kwargs, self._by_value))

    def do(self, operation: str, *operands: Any) -> Any:
        return self._asked(("do", operation, *operands), [])

    def next(self, iterator: Any, count: int) -> tuple[list[Any], bool]:
        found = self._asked(("next", iterator, count), [])
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], list):
            raise self._lost()
        return found[0][:count], bool(found[1])

    def agrees_to_anything(self, remote: Remote) -> bool:
        """True if it also equals an object that it cannot know."""
        try:
            return bool(self.do("decoy", remote))
        except Exception:
            return False

    def bound(self, name: str) -> Any:
        """Returns what the program calls by this name; the judge's own copy, if it is from the standard library."""
        if name in self.functions:
            return self.remote(self.functions[name])
        self.binding = True
        try:
            return self._asked(("global", name), [])
        finally:
            self.binding = False

    def names(self) -> list[str]:
        found = self._answer([])
        if not isinstance(found, dict):
            raise self._lost()
        self.functions = {name: number for name, number in found.items() if isinstance(number, int)}
        return list(found)

    def expected(self, expression: Callable[[], Any]) -> Any:
        """The value of an expression of a check while all arguments are what they were before functions of the program
        changed them: what a result is compared with must not come from what the program wrote."""
        if not self.before:
            return expression()
        now = [(argument, content(argument)) for argument, _ in self.before.values()]
        for argument, was in self.before.values():
            fill(argument, was)
        try:
            return self._copy(expression())
        finally:
            for argument, found in now:
                fill(argument, found)

    def _copy(self, value: Any) -> Any:
        """Copies what the checks have; the program's objects stay the same."""
        self.looking_back = True
        try:
            return copy.deepcopy(value)
        except Exception:
            return value
        finally:
            self.looking_back = False

    def remote(self, number: int, base: str = "") -> Remote:
        if number not in self.remotes:
            self.remotes[number] = Remote(self, number)
        if base:
            object.__setattr__(self.remotes[number], "_Remote__base", base)
        return self.remotes[number]

    def made(self, kind: str, *parts: Any) -> Any:
        """Makes what an answer names that is no plain value."""
        if kind == "local":
            return self.locals[int(parts[0])]
        if kind == "library" and self.binding:
            return from_library(*parts)
        if kind == "error class":
            return self._mirror(parts[1])
        remote = self.remote(int(parts[0]))
        if kind == "object" and parts[1] == "coroutine":
            return awaited(remote)
        if kind == "object":
            return self.remote(int(parts[0]), str(parts[1]))
        if kind == "valued":
            value = read(parts[1], self)
            made = VALUED[type(value)](value)
            vars(made)["of_the_program"] = remote
            return made
        raise ValueError(kind)

    def number_of(self, value: Any) -> int | None:
        """Returns the number of an object of the program's; None for any other object."""
        if issubclass(type(value), type):
            return value.number if issubclass(value, Raised) else None
        if not is_remote(value):
            return None
        return number_of(value if type(value) is Remote else vars(value)["of_the_program"])

    def stays(self, value: Any) -> bool:
        """True if the program gets a number for it, and not a copy."""
        if isinstance(value, FunctionType | type):
            return value.__module__ == MODULE and (isinstance(value, FunctionType) or value.__name__ not in self.shared)
        if isinstance(value, BuiltinMethodType):
            return value.__self__ is not None and not isinstance(value.__self__, ModuleType)
        own = type(value).__module__ == MODULE and type(value).__name__ not in self.shared
        return own or isinstance(value, MethodType | GeneratorType)

    def _by_value(self, value: Any) -> bool:
        return type(value).__name__ in self.shared and hasattr(value, "__dict__")

    def place(self, value: Any) -> int:
        for number, known in enumerate(self.locals):
            if known is value:
                return number
        self.locals.append(value)
        return len(self.locals) - 1

    def _asked(self, question: tuple[Any, ...], arguments: list[Any]) -> Any:
        self._send(question)
        return self._answer(arguments)

    def _send(self, question: tuple[Any, ...]) -> None:
        whole = io.BytesIO()
        Question(whole, self).dump(question)
        try:
            self.writer.write(whole.getbuffer())
            self.writer.flush()
        except OSError as error:
            raise self._lost() from error

    def _answer(self, arguments: list[Any]) -> Any:
        while True:
            try:
                kind, value, *changes = json.loads(self.reader.readline())
                if kind == "callback":
                    operation, number, operands = value[0], int(value[1]), [read(item, self) for item in value[2]]
                    subject = self.locals[number]
                else:
                    found = self._error(*value) if kind == "raised" else read(value, self)
                    self._change(arguments, changes, found)
            except Gone:
                raise
            except Exception as error:
                raise self._lost() from error
            if kind == "raised":
                raise found
            if kind != "callback":
                return found
            self._send(_reply(operation, subject, operands))

    def _lost(self) -> Gone:
        self.gone = True
        return Gone()

    def _change(self, arguments: list[Any], changes: list[Any], found: Any) -> None:
        if not changes:
            return
        if found is not None:  # a function, not a procedure: its arguments may be what its result is compared with
            was = {id(argument): (argument, content(argument)) for argument in arguments}
            self.before = was | self.before
        line = _Arguments(self, arguments)
        for place, value in changes:
            fill(arguments[int(place)], read(value, line))

    def _error(self, kind: Any, args: Any, text: str, number: int) -> Exception:
        """Returns the error that the program raised; a RuntimeError for one that ends loops, since
        `all(map(candidate, ...))` would take it for the end."""
        found = read(kind, self)
        cls: Any = found if _is_error(found) else RuntimeError
        plain = read(args, self) if args is not None else (str(text),)
        if issubclass(cls, Raised):
            error = cls.__new__(cls, *plain)
            error.args = plain
            error.of_the_program = self.remote(int(number))
            return error
        try:
            return cls(*plain)
        except TypeError:  # it wants something else
            return RuntimeError(f"{cls.__name__}: {text}")

    def _mirror(self, ancestors: list[Any]) -> Any:
        """Returns a class that stands here for an exception's class of the program's, below those that it extends."""
        (name, number), *rest = ancestors
        if number is None:
            found = getattr(builtins, name, None)
            return found if _is_error(found) else RuntimeError
        number = int(number)
        if number not in self.errors:
            bases = [self._mirror(rest[place:]) for place, (_, own) in enumerate(rest) if place == 0 or own is None]
            space = {"line": self, "number": number, "__module__": MODULE}
            self.errors[number] = type(str(name), _compatible(bases), space)
        return self.errors[number]


class _Arguments:
    """Makes what a changed argument holds; an argument inside another is the object that the check has."""

    def __init__(self, line: Line, arguments: list[Any]):
        self.line, self.arguments = line, arguments

    def made(self, kind: str, *parts: Any) -> Any:
        return self.arguments[int(parts[0])] if kind == "argument" else self.line.made(kind, *parts)


def _compatible(bases: list[Any]) -> tuple[Any, ...]:
    """Raised, and those of which one class can be made, without any that another extends already."""
    kept: list[Any] = [] if issubclass(bases[0], Raised) else [Raised]
    for base in bases:
        if any(issubclass(one, base) for one in kept):
            continue
        try:
            type("Trial", (*kept, base), {})
            kept.append(base)
        except TypeError:
            continue
    return tuple(kept)


def _is_error(found: Any) -> bool:
    return issubclass(type(found), type) and issubclass(found, Exception) and not issubclass(found, ENDINGS)


def _reply(operation: str, subject: Any, operands: list[Any]) -> tuple[Any, ...]:
    """Returns the answer of an object of the checks to the program."""
    try:
        return "reply", _done(operation, subject, operands)
    except Exception as error:
        own = isinstance(error, Raised) and vars(error).get("of_the_program")
        return "reply raised", own or (type(error).__name__, str(error)[:500])


def _done(operation: str, subject: Any, operands: list[Any]) -> Any:
    if operation == "call" and callable(subject):
        args, kwargs = operands
        return subject(*args, **kwargs)
    if operation in ("iter", "next") and hasattr(type(subject), "__next__"):
        return next(subject) if operation == "next" else subject
    own = type(subject).__module__ == MODULE and not isinstance(subject, type | FunctionType | MethodType)
    if not own and operation in ("bool", "eq", "str"):
        return {"bool": True, "eq": False, "str": "<of a test>"}[operation]
    if own and operation in ("getattr", "setattr") and not str(operands[0]).startswith("_"):
        return getattr(subject, operands[0]) if operation == "getattr" else setattr(subject, *operands)
    if own and operation in FROM_OBJECTS:
        return FROM_OBJECTS[operation](subject, *operands)
    raise TypeError(f"a program cannot do this with an object of the checks: {operation}")
