"""Reward functions of a file, of a module or of the program that runs, in one form: responses in, a score for each out.

The names in a function's signature tell its `Shape`: how it is called, and what it is given of what there is. `BATCH`
alone follows from the config.
"""

from __future__ import annotations

import difflib
import inspect
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from paddock.core.registry import suggest
from paddock.facts.compat import importable, why_missing
from paddock.facts.modules import MODULE, file_at, module_at
from paddock.rewards.score import Failed, Score, ScoreRequest, checked


@dataclass(frozen=True)
class Shape:
    """How a function is called."""

    arguments: tuple[str, ...]
    """Names of the arguments that there are for every row."""
    whole: bool = False
    """True if it is called once with all responses of a batch."""
    of_trl: bool = False
    """True if it has TRL's contract, ``reward(prompts, completions, **columns)``: None as a score says that it does not
    apply to the row. Prompts and completions are texts for a row whose prompt is a text, else lists of messages."""
    reads_prompts: bool = False
    """True if it may be given prompts and token ids."""
    reads_environments: bool = False
    """True if it is given the environments of conversations."""


ROW = Shape(("data_source", "solution_str", "ground_truth", "extra_info"))
"""Called with one response, as verl does."""
FIELDS = Shape(("completion", "prompt", "ground_truth", "data_source", "extra_info"), reads_prompts=True)
"""Called with one response, its prompt, and the row's columns by their names."""
BATCH = Shape(("data_sources", "solution_strs", "ground_truths", "extra_infos"), whole=True)
"""Called with lists of a batch, as verl's batch manager does."""
COLUMNS = Shape(
    ("completions", "prompts", "completion_ids", "ground_truth", "data_source", "extra_info"),
    whole=True,
    of_trl=True,
    reads_prompts=True,
)
"""Called with lists of a batch, and of the rows' columns by their names."""

OF_VERL = frozenset({"solution_str", *BATCH.arguments})
OF_TRL = frozenset({"prompts", "completions", "completion_ids", "environments"})
TRUTHS = ("answer", "solution")
"""Names under which data sets of others have the ground truth."""
SELDOM = frozenset({*TRUTHS, "log_extra", "log_metric", "trainer_state", "environments"})
"""Arguments that messages leave out, since few functions ask for them."""

MISTAKES = (NameError, ImportError, SyntaxError)
"""Exceptions that come from a mistake in the function's code, not from the network: a retry cannot help."""
DOES_NOT_APPLY = Score(0.0, applies=False)


@dataclass(frozen=True)
class Target:
    """Names a function: ``Target("my_reward.py", "compute_score")`` or ``Target("pkg://package.module", "score")``."""

    path: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    function: Callable[..., Any] | None = None
    """The function itself, if it is a function of this program that no other process can import."""
    sent: str | None = None
    """A file that holds it for other processes (sending.py)."""
    batch: bool = False
    """True if a function of verl's arguments is called once with lists."""

    def __str__(self) -> str:
        return f"{self.path.removeprefix(MODULE)}:{self.name}"


@lru_cache(maxsize=128)
def load(target: Target) -> RewardFunction:
    return RewardFunction(target)


class RewardFunction:
    """A function that is called with responses and returns a score for each. Whatever goes wrong is `Failed`."""

    def __init__(self, target: Target):
        self.target, self.function = target, function_of(target)
        self.signature, self.shape = signature_of(self.function), shape_of(self.function, target.batch)
        if unused := target.kwargs.keys() - self.signature.taken(target.kwargs).keys():
            raise Failed(f"takes no {min(unused)!r}, which reward_kwargs gives it, and has no **kwargs")
        if self.shape == BATCH:
            self.signature.require({**dict.fromkeys(BATCH.arguments), **target.kwargs}, BATCH)

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return self.scores(requests) if self.shape.whole else [self.score(request) for request in requests]

    def call(self, given: Mapping[str, Any]) -> Any:
        """Calls the function with what it names of `given`; the result may be something to await."""
        given = {**given, **self.target.kwargs}
        self.signature.require(given, self.shape)
        return self.function(**self.signature.taken(given))

    def call_for(self, request: ScoreRequest) -> Any:
        """Calls a function of one response."""
        return self.call(row_of(request) if self.shape == ROW else fields_of(request))

    def score(self, request: ScoreRequest) -> Score:
        try:
            return checked(finished(self.call_for(request)))
        except BaseException as error:
            self.fail(error)

    def scores(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Scores all responses by one call."""
        logged: dict[str, list[Any]] = {}
        count, row = len(requests), None
        try:
            if self.shape == BATCH:
                given = lists_of(requests)
            else:
                given = {**columns_of(requests), **logging_into(logged, count)}
            results = listed(finished(self.call(given)), count)
            for row, result in enumerate(results):
                score = DOES_NOT_APPLY if result is None and self.shape != BATCH else checked(result)
                extras = checked({"score": 0.0, **{name: values[row] for name, values in logged.items()}}).extras
                results[row] = replace(score, extras={**score.extras, **extras})
        except BaseException as error:
            self.fail(error, row)
        return results

    def fail(self, error: BaseException, row: int | None = None) -> NoReturn:
        """Raises what went wrong in a call as `Failed`, with the line of the function's own file."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        if isinstance(error, Failed):
            raise Failed(str(error), row, error.lasting, error.fix) from error
        raise Failed(f"raised {described(error, self.target)}", row, lasting=isinstance(error, MISTAKES)) from error


# What a function is given


def row_of(request: ScoreRequest) -> dict[str, Any]:
    """Returns what verl gives a scorer, by its names."""
    return {
        "data_source": request.data_source,
        "solution_str": request.solution,
        "ground_truth": request.ground_truth,
        "extra_info": extra_info_of(request),
    }


def lists_of(requests: Sequence[ScoreRequest]) -> dict[str, Any]:
    """Returns the rows as lists, by the names of verl's batch manager."""
    rows = [row_of(request) for request in requests]
    return {f"{name}s": [row[name] for row in rows] for name in ROW.arguments}


def fields_of(request: ScoreRequest) -> dict[str, Any]:
    """Returns the response, the prompt, and the row's columns by their names."""
    columns = extra_info_of(request)
    return {
        "extra_info": columns,
        **dict.fromkeys(TRUTHS, request.ground_truth),
        **columns,
        "data_source": request.data_source,
        "ground_truth": request.ground_truth,
        "prompt": request.prompt,
        "completion": request.solution,
    }


def columns_of(requests: Sequence[ScoreRequest]) -> dict[str, Any]:
    """Returns lists by TRL's names. A row without a field that another row has gives None there."""
    fields = dict.fromkeys(name for request in requests for name in request.extra_info)
    truths = [request.ground_truth for request in requests]
    environments = [request.environment for request in requests]
    return {
        **dict.fromkeys(TRUTHS, truths),
        **{name: [request.extra_info.get(name) for request in requests] for name in fields},
        "data_source": [request.data_source for request in requests],
        "ground_truth": truths,
        "extra_info": [extra_info_of(request) for request in requests],
        "prompts": [request.prompt for request in requests],
        "completions": [completion_of(request) for request in requests],
        "completion_ids": [list(request.tokens) for request in requests],
        "trainer_state": TrainerState(*requests[0].steps),
        **({"environments": environments} if any(each is not None for each in environments) else {}),
    }


def extra_info_of(request: ScoreRequest) -> Mapping[str, Any]:
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
        **request.extra_fields,
    }


def completion_of(request: ScoreRequest) -> Any:
    """The response as TRL has it: a text after a text, else the messages behind the prompt."""
    if isinstance(request.prompt, str):
        return request.solution
    if request.turns is not None:
        return [dict(message) for message in request.turns]
    return [{"role": "assistant", "content": request.solution}]


@dataclass(frozen=True)
class TrainerState:
    """What TRL's `trainer_state` says of a run's progress."""

    global_step: int
    """Training steps that are done."""
    max_steps: int


def logging_into(logged: dict[str, list[Any]], count: int) -> dict[str, Callable[..., None]]:
    """`log_extra(column, values)` makes a column of samples and dumps; `log_metric(name, value)` one with equal rows,
    whose mean is the value."""

    def log_extra(column: str, values: Sequence[Any]) -> None:
        if len(values) != count:
            raise ValueError(f"log_extra({column!r}) has {len(values)} values for {count} completions")
        logged[column] = list(values)

    def log_metric(name: str, value: float) -> None:
        logged[name] = [value] * count

    return {"log_extra": log_extra, "log_metric": log_metric}


# What a function takes


def shape_of(function: Callable[..., Any], batch: bool = False) -> Shape:
    """Returns how a function is called. `batch`: verl's batch manager calls it, unless it is of TRL's contract."""
    signature = signature_of(function)
    of_verl = bool(signature.named & OF_VERL)
    if signature.named & OF_TRL and not of_verl:
        return replace(COLUMNS, reads_environments="environments" in signature.named)
    if batch:
        return BATCH
    if not of_verl and ("completion" in signature.named or {*signature.needed} - {*ROW.arguments}):
        return FIELDS
    return ROW


@dataclass(frozen=True)
class Signature:
    """Holds the names of a function's arguments."""

    named: frozenset[str]
    needed: tuple[str, ...]
    """Names of the arguments without a default."""
    takes_all: bool
    """True if it has ``**kwargs``, or says nothing of its arguments, as a function written in C may."""
    placed: str | None = None
    """An argument that it takes by position alone."""

    def taken(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what of `given` the function takes."""
        if self.takes_all:
            return dict(given)
        return {name: value for name, value in given.items() if name in self.named}

    def require(self, given: Mapping[str, Any], shape: Shape) -> None:
        """Refuses a function that needs what is not given, or takes nothing of it."""
        if self.placed:
            reason = f"takes {self.placed!r} by its position alone, and arguments are given by their names"
            fix = "leave the / out of its arguments, or put a function around it; the response is `completion`"
            raise Failed(reason, fix=fix)
        missing = [name for name in self.needed if name not in given]
        if missing or (not self.takes_all and self.named.isdisjoint(given)):
            raise self.unmet(given, missing, shape)
        truth = next((name for name in TRUTHS if name in self.needed), None)
        if truth and shape == FIELDS and not self.takes_all and "completion" not in self.named:
            reason = f"takes {truth!r}, which is the row's ground truth, and no response"
            raise Failed(reason, fix=f"name the response `completion`: f(completion, {truth})")

    def unmet(self, given: Mapping[str, Any], missing: Sequence[str], shape: Shape) -> Failed:
        """Returns the error of a function that cannot be called with what there is."""
        names = shape.arguments
        columns = [] if shape in (ROW, BATCH) else sorted(given.keys() - {*names} - SELDOM)
        offered = ", ".join(names) + (f", or columns of the rows: {', '.join(columns)}" if columns else "")
        if not missing:
            reason = f"takes nothing of what it is given; it may name {offered}"
            return Failed(reason, fix="name what it shall read")
        wanted = " and ".join(map(repr, missing))
        reason = f"takes {wanted}, and nothing that it is given is called so; it may name {offered}"
        if shape != BATCH and self.named & {*BATCH.arguments}:
            return Failed(reason, fix="reward_model.reward_manager=batch calls it once, with lists")
        known = [name for name in (*names, *columns) if name not in self.named]
        for name in missing:
            if close := difflib.get_close_matches(name, known, n=1):
                return Failed(reason, fix=f"did you mean {close[0]!r}? Rename the argument {name!r} of the function")
        say = {
            FIELDS: "rename what it takes; the response is `completion`",
            ROW: "rename what it takes; with `completion` in place of `solution_str` it may name columns of the rows",
        }
        value = f"custom_reward_function.reward_kwargs={{{missing[0]}: 1}}"
        return Failed(reason, fix=f"{say.get(shape, 'rename what it takes')}. Or give it a value: {value}")


def signature_of(function: Callable[..., Any]) -> Signature:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C, without a signature
        return Signature(frozenset(), (), takes_all=True)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        frozenset(p.name for p in named),
        tuple(p.name for p in named if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        next((p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty), None),
    )


# The function at an address


def function_of(target: Target) -> Callable[..., Any]:
    if target.function is not None:
        return target.function
    try:
        if target.sent is not None:
            importable()  # modules of the program are imported
            function: Callable[..., Any] = pickle.loads(Path(target.sent).read_bytes())
            return function
        module = module_at(target.path)
    except BaseException as error:  # a user's code runs: SystemExit is as likely as SyntaxError
        if target.sent is not None:
            raise Failed(f"cannot be loaded: {described(error, target)}") from error
        raise Failed(f"cannot be imported: {described(error, target)}{why_missing(error)}") from error
    named = getattr(module, target.name, None)
    if not callable(named):
        here = [
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        known = suggest(target.name, here) if here else "it defines none"
        raise Failed(f"is not there: {Path(target.path).name} has no function {target.name!r}; {known}")
    return named


# What a function returns


def described(error: BaseException, target: Target) -> str:
    """`ZeroDivisionError: division by zero (my_reward.py line 12)`: the innermost line of the function's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file_at(target.path)] or frames
    text = str(error)
    line = ""
    if own and not isinstance(error, SyntaxError):
        line = f" ({Path(own[-1].filename).name} line {own[-1].lineno})"
    return f"{type(error).__name__}{f': {text}' if text else ''}{line}"


def listed(results: Any, count: int) -> list[Any]:
    """Returns one result per row. A mapping or a text has a length too, and is not meant."""
    results = results.tolist() if hasattr(results, "tolist") else results
    if not isinstance(results, list | tuple):
        raise Failed(f"returned {results!r:.80} ({type(results).__name__}), not a list with a score for each row")
    if len(results) != count:
        raise Failed(f"returned {len(results)} scores for {count} rows")
    return list(results)


def finished(result: Any) -> Any:
    """Awaits a result that is awaitable."""
    if not inspect.isawaitable(result):
        return result
    from paddock.core.background import awaited_here  # asyncio is a third of the time that a worker takes to start

    return awaited_here(result)
