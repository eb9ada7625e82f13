"""Scorers by address: a function in the user's file, or in a module."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from paddock.core.registry import suggest
from paddock.rewards.score import BadScore, Score, ScoreRequest, checked

MODULE = "pkg://"


@dataclass(frozen=True)
class Target:
    """Where a scorer is: ``Target("my_reward.py", "compute_score")`` or ``Target("pkg://package.module", "score")``."""

    path: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.path.removeprefix(MODULE)}:{self.name}"


class Failed(Exception):
    """A scorer that cannot be loaded, raised, or returned what is no score; the text says which, and where."""


def load(target: Target) -> Callable[[ScoreRequest], Score]:
    """The function at this address, taking a request; a coroutine function is run to its end."""
    try:
        module = _module(target.path)
    except BaseException as error:  # a user's file runs: SystemExit is as likely as SyntaxError
        raise Failed(f"cannot be imported: {described(error, target)}") from error
    function = getattr(module, target.name, None)
    if not callable(function):
        here = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise Failed(f"has no function {target.name!r}; {suggest(target.name, here) if here else 'it defines none'}")

    def score(request: ScoreRequest) -> Score:
        try:
            result = function(
                data_source=request.data_source,
                solution_str=request.solution,
                ground_truth=request.ground_truth,
                extra_info=request.extra_info,
                **target.kwargs,
            )
            return checked(_finished(result))
        except BadScore as error:
            raise Failed(str(error)) from error
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise Failed(f"raised {described(error, target)}") from error

    return score


def described(error: BaseException, target: Target) -> str:
    """`ZeroDivisionError: division by zero (my_reward.py line 12)`: the innermost line of the scorer's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == _file(target.path)] or frames
    text = str(error)
    place = (
        f" ({Path(own[-1].filename).name} line {own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
    )
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


def _module(path: str) -> ModuleType:
    if path.startswith(MODULE):
        return importlib.import_module(path.removeprefix(MODULE))
    file = _file(path)
    name = f"paddock_reward_{hashlib.blake2b(file.encode(), digest_size=6).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec and spec.loader, file
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(Path(file).parent))  # its neighbours, as if it were run as a script
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _file(path: str) -> str:
    return str(Path(path).expanduser().resolve())


_loop: Any = None


def _finished(result: Any) -> Any:
    """One event loop serves the process, so that a client which a function keeps stays usable."""
    global _loop
    if not inspect.isawaitable(result):
        return result

    import asyncio  # a third of the time that a worker takes to start, for the few that need it

    async def wait() -> Any:
        return await result

    _loop = _loop or asyncio.Runner()
    return _loop.run(wait())
