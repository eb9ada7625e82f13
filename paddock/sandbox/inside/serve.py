"""The program's end of the line: answers the questions of the checks. Everything here can be changed by the program."""

from __future__ import annotations

import builtins
import copy
import json
import operator
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any

from .wire import CHANGING, Foreign, Kept, awaited, containers, content, library_name, plain, same_content, written

AT_ONCE = 0.005  # seconds after which items that are ready are sent, though more were asked for
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "xor", "lshift", "rshift", "lt", "le", "gt",
        "ge", "eq", "neg", "pos", "invert", "getitem", "setitem", "delitem", "contains", "index",
    )},
    "and": operator.and_, "or": operator.or_, "getattr": getattr, "setattr": setattr, "delattr": delattr,
    "isinstance": isinstance, "issubclass": issubclass, "hash": hash, "bool": bool, "len": len, "str": str,
    "repr": repr, "int": int, "float": float, "complex": complex, "abs": abs, "round": round, "format": format,
    "reversed": reversed, "iter": iter, "dir": dir, "copy": copy.copy, "deepcopy": copy.deepcopy,
    "class": lambda value: value.__class__,
    "decoy": lambda value: (value == object()) is True,
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *error: type(value).__exit__(value, *error),
}  # fmt: skip


class Questions(pickle.Unpickler):
    """Reads what the checks ask; see `Question` in line.py for what it must find."""

    def __init__(self, file: Any, talk: Talk):
        super().__init__(file)
        self.talk = talk

    def find_class(self, module: str, name: str) -> Any:
        if name == "kept_object":
            return self.talk.kept.__getitem__
        if name == "foreign_object":
            return self.talk.foreign
        return super().find_class(module, name)


class Talk:
    """Serves one question at a time; a question may come while the program waits for a function of the checks."""

    def __init__(self, link: socket.socket, space: dict[str, Any]):
        self.reader, self.writer = link.makefile("rb"), link.makefile("wb")
        self.space, self.own, self.kept = space, os.getpid(), Kept()
        self.pending: dict[int, BaseException] = {}
        self.known: dict[int, Any] = {}
        self.lock = threading.RLock()

    def serve(self) -> int:
        """Answers questions until the checks are through. Returns the exit code."""
        self.send("names", self._names(), ready=True)
        while True:
            try:
                question = Questions(self.reader, self).load()
            except EOFError:
                return 0
            self.answer(question)

    def send(self, kind: str, value: Any, changes: list[Any] | None = None, ready: bool = False) -> None:
        if os.getpid() != self.own:  # a child that the program forked
            os._exit(0)
        whole = [kind, value if ready else written(value, self.kept), *(changes or [])]
        self.writer.write(json.dumps(whole).encode() + b"\n")
        self.writer.flush()

    def answer(self, question: tuple[Any, ...]) -> None:
        kind, *parts = question
        arguments = containers(parts[1], parts[2], self._by_value) if kind == "call" else []
        before = [content(argument) for argument in arguments]
        try:
            value = self._global(*parts) if kind == "global" else written(self._found(kind, *parts), self.kept)
            return self.send("value", value, self._changes(arguments, before), ready=True)
        except Exception as error:
            raised = self._raised(error)
        # Out here the error is gone, and the memory that its frames held.
        self.send("raised", raised, self._changes(arguments, before), ready=True)

    def callback(self, operation: str, number: int, *operands: Any) -> Any:
        """Asks the checks about an object of theirs."""
        with self.lock:
            self.send("callback", [operation, number, [written(item, self.kept) for item in operands]], ready=True)
            while True:
                kind, *parts = Questions(self.reader, self).load()
                if kind == "reply":
                    return parts[0]
                if kind == "reply raised":
                    raise _error(parts[0])
                self.answer((kind, *parts))

    def foreign(self, number: int) -> Any:
        if number not in self.known:
            self.known[number] = Object(self, number)
        return self.known[number]

    def _found(self, kind: str, *parts: Any) -> Any:
        if kind == "call":
            subject, args, kwargs = parts
            function = self._function(subject) if isinstance(subject, str) else self.kept[subject]
            return function(*args, **kwargs)
        if kind == "next":
            return self._next(*parts)
        operation, subject, *operands = parts
        if operation == "plain":
            return next(plain(subject, base) for base in CHANGING.values() if isinstance(subject, base))
        if operation == "await":
            import asyncio  # many modules, for the few programs that need it

            return asyncio.run(awaited(subject))
        return OPERATIONS[operation](subject, *operands)

    def _names(self) -> dict[str, int | None]:
        """Functions of the program with their numbers; what any other name stands for is told when it is asked for."""
        own = {name: value for name, value in self.space.items() if not name.startswith("__")}
        return {name: self.kept.place(value) if type(value) is FunctionType else None for name, value in own.items()}

    def _global(self, name: str) -> Any:
        value = self.space[name]
        place = library_name(value)
        return ["library", *place] if place else written(value, self.kept)

    def _by_value(self, value: Any) -> bool:
        return id(value) not in self.kept.places and hasattr(value, "__dict__")

    def _function(self, name: str) -> Any:
        """Returns a function of the program, or a method of its class `Solution` as some sites want it."""
        name = name.rpartition(".")[2]
        if name not in self.space and "Solution" in self.space:
            return getattr(self.space["Solution"](), name)
        if name not in self.space:
            raise NameError(f"name {name!r} is not defined")
        return self.space[name]

    def _next(self, iterator: Any, count: int) -> tuple[list[Any], bool]:
        if error := self.pending.pop(id(iterator), None):
            raise error
        items: list[Any] = []
        end = time.monotonic() + AT_ONCE
        try:
            while len(items) < count and (not items or time.monotonic() < end):
                items.append(next(iterator))
        except StopIteration:
            return items, True
        except Exception as error:
            if not items:
                raise
            self.pending[id(iterator)] = error
        return items, False

    def _changes(self, arguments: list[Any], before: list[Any]) -> list[Any]:
        """`[place, content]` of each argument that was changed."""
        if not arguments:
            return []
        changed = [
            (place, now)
            for place, (argument, was) in enumerate(zip(arguments, before, strict=True))
            if not same_content(was, now := content(argument))
        ]
        if not changed:
            return []
        self.kept.arguments = {id(argument): place for place, argument in enumerate(arguments)}
        try:
            return [[place, written(now, self.kept)] for place, now in changed]
        finally:
            self.kept.arguments = {}

    def _raised(self, error: BaseException) -> list[Any]:
        kind = written(type(error), self.kept)
        try:
            args = written(tuple(error.args), self.kept)
        except Exception:
            args = None
        return [kind, args, str(error)[:500], self.kept.place(error)]


class Object(Foreign):
    """A function or an object of the checks."""

    def __init__(self, talk: Talk, number: int):
        vars(self).update(_talk=talk, number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._talk.callback("call", self.number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._talk.callback("getattr", self.number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._talk.callback("setattr", self.number, name, value)

    def __iter__(self) -> Any:
        found = self._talk.callback("iter", self.number)
        return iter(found) if not isinstance(found, Object) else found

    def __next__(self) -> Any:
        return self._talk.callback("next", self.number)

    def __eq__(self, other: object) -> bool:
        return self is other or self._talk.callback("eq", self.number, other) is True

    def __hash__(self) -> int:
        return object.__hash__(self)


def _equip() -> None:
    for name in ("len", "bool", "str", "getitem", "lt", "contains"):

        def method(self: Any, *operands: Any, _name: str = name) -> Any:
            return self._talk.callback(_name, self.number, *operands)

        setattr(Object, f"__{name}__", method)


_equip()


def _error(raised: Any) -> BaseException:
    """Returns what a function of the checks raised: the program's own error, or one of Python's."""
    if isinstance(raised, BaseException):
        return raised
    name, text = raised
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):  # it wants more than a text
            return kind(text)
    return RuntimeError(f"{name}: {text}")


def run(link: socket.socket, space: dict[str, Any]) -> int:
    return Talk(link, space).serve()
