"""Scorers by address: a function in the user's file, in a module, or of the program that runs.

Its signature tells how it is called, and what it is given of what there is (signature.py).
"""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from paddock.core.registry import suggest
from paddock.facts.compat import importable, why_missing
from paddock.facts.modules import MODULE, file_at, module_at
from paddock.rewards.score import BadScore, Failed, Score, ScoreRequest, checked
from paddock.rewards.signature import (
    BATCH,
    COMPLETION,
    FIELDS,
    ROW,
    TRUTHS,
    signature_of,
    takes_columns,
    takes_fields,
)


@dataclass(frozen=True)
class Target:
    """Names a scorer: ``Target("my_reward.py", "compute_score")`` or ``Target("pkg://package.module", "score")``."""

    path: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    function: Callable[..., Any] | None = None
    """The function itself, if it is one of this program's that no other process can import."""
    sent: str | None = None
    """A file that holds it for other processes (sending.py)."""

    def __str__(self) -> str:
        return f"{self.path.removeprefix(MODULE)}:{self.name}"


MISTAKES = (NameError, ImportError, SyntaxError)
"""Exceptions that come from a mistake in the scorer's code, not from the network: a retry cannot help."""


@lru_cache(maxsize=128)
def load(target: Target) -> Callable[[ScoreRequest], Score]:
    """Returns the function at this address, taking a request; a coroutine function is run to its end."""
    return row_scorer(target)


def row_scorer(target: Target) -> Callable[[ScoreRequest], Score]:
    _, call = caller_of(target)
    blame = blaming(target)

    def score(request: ScoreRequest) -> Score:
        with blame:
            return checked(finished(call(request)))

    return score


Call = Callable[[ScoreRequest], Any]


def caller_of(target: Target) -> tuple[Callable[..., Any], Call]:
    """Returns the function, and what calls it with one response; that returns a score, or something to await."""
    function = function_of(target)
    if takes_columns(function):
        reason = "takes a whole batch, and reward_model.reward_manager=rate_limited calls it for one response"
        raise Failed(reason, fix="name `completion` in place of `completions`, or choose another reward_manager")
    signature = signature_of(function)
    signature.require_use(target.kwargs)
    fields, names = (fields_of, FIELDS) if takes_fields(function) else (row_of, ROW)

    def call(request: ScoreRequest) -> Any:
        given = {**fields(request), **target.kwargs}
        signature.require(given, names)
        return function(**signature.taken(given))

    return function, call


@lru_cache(maxsize=128)
def load_batch(target: Target) -> Callable[[Sequence[ScoreRequest]], list[Score]]:
    """Returns the function at this address, called once for all requests with a list of each argument."""
    return batch_scorer(target)


def batch_scorer(target: Target) -> Callable[[Sequence[ScoreRequest]], list[Score]]:
    function = function_of(target)
    signature = signature_of(function)
    signature.require_use(target.kwargs)
    signature.require({**dict.fromkeys(BATCH), **target.kwargs}, BATCH)

    def scores(requests: Sequence[ScoreRequest]) -> list[Score]:
        with blaming(target):
            given = {
                "data_sources": [request.data_source for request in requests],
                "solution_strs": [request.solution for request in requests],
                "ground_truths": [request.ground_truth for request in requests],
                "extra_infos": [told(request) for request in requests],
                **target.kwargs,
            }
            found = finished(function(**signature.taken(given)))
            results = listed(found, len(requests))
        for row, result in enumerate(results):
            with blaming(target, row):
                results[row] = checked(result)
        return results

    return scores


def row_of(request: ScoreRequest) -> dict[str, Any]:
    """Returns what verl gives a scorer, by its names."""
    return {
        "data_source": request.data_source,
        "solution_str": request.solution,
        "ground_truth": request.ground_truth,
        "extra_info": told(request),
    }


def told(request: ScoreRequest) -> Mapping[str, Any]:
    """Returns the row's columns; for a conversation also its `messages`, its `last_turn` and `num_turns`, and what its
    environment says of it."""
    if request.turns is None:
        return request.extra_info
    last = request.solution if request.last_turn is None else request.last_turn
    return {
        **request.extra_info,
        "messages": list(request.turns),
        "last_turn": last,
        "num_turns": 1 + len(request.turns),
        **request.told,
    }


def fields_of(request: ScoreRequest) -> dict[str, Any]:
    """Returns the response, the prompt, and the row's columns by their names."""
    columns = told(request)
    return {
        "extra_info": columns,
        **dict.fromkeys(TRUTHS, request.ground_truth),
        **columns,
        "data_source": request.data_source,
        "ground_truth": request.ground_truth,
        "prompt": request.prompt,
        COMPLETION: request.solution,
    }


class blaming:  # a generator's context takes longer than many a rule
    """Whatever goes wrong inside is `Failed`, with the line of the scorer's own file."""

    __slots__ = ("row", "target")

    def __init__(self, target: Target, row: int | None = None):
        self.target, self.row = target, row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, Failed | KeyboardInterrupt):
            return
        if isinstance(error, BadScore):
            raise Failed(str(error), self.row) from error
        lasting = isinstance(error, MISTAKES)
        raise Failed(f"raised {described(error, self.target)}", self.row, lasting) from error


def function_of(target: Target) -> Callable[..., Any]:
    if target.function is not None:
        return target.function
    if target.sent is not None:
        return received(target)
    try:
        module = module_at(target.path)
    except BaseException as error:  # a user's file runs: SystemExit is as likely as SyntaxError
        raise Failed(f"cannot be imported: {described(error, target)}{why_missing(error)}") from error
    function = getattr(module, target.name, None)
    if not callable(function):
        here = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        known = suggest(target.name, here) if here else "it defines none"
        raise Failed(f"is not there: {Path(target.path).name} has no function {target.name!r}; {known}")
    return function


def received(target: Target) -> Callable[..., Any]:
    """Returns the function that another process wrote to a file, with what it reads."""
    importable()
    try:
        function: Callable[..., Any] = pickle.loads(Path(str(target.sent)).read_bytes())
    except BaseException as error:  # modules of the program are imported
        raise Failed(f"cannot be loaded: {described(error, target)}") from error
    return function


def listed(results: Any, count: int) -> list[Any]:
    """Returns one result per row. A mapping or a text has a length too, and is not meant."""
    results = results.tolist() if hasattr(results, "tolist") else results
    if not isinstance(results, list | tuple):
        raise BadScore(f"returned {results!r:.80} ({type(results).__name__}), not a list with a score for each row")
    if len(results) != count:
        raise BadScore(f"returned {len(results)} scores for {count} rows")
    return list(results)


def described(error: BaseException, target: Target) -> str:
    """`ZeroDivisionError: division by zero (my_reward.py line 12)`: the innermost line of the scorer's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file_at(target.path)] or frames
    text = str(error)
    place = (
        f" ({Path(own[-1].filename).name} line {own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
    )
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


def finished(result: Any) -> Any:
    """Awaits a result that is awaitable."""
    if not inspect.isawaitable(result):
        return result
    from paddock.core.background import awaited_here  # asyncio is a third of the time that a worker takes to start

    return awaited_here(result)
