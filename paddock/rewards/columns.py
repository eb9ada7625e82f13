"""Reward functions of TRL's contract: one call for a whole batch, every argument a list with one entry per response.

    def reward(prompts, completions, **columns) -> list[float | None]

`prompts` and `completions` are texts for a row whose prompt is a text, and lists of messages for a row whose prompt is
one. Columns are `data_source`, `ground_truth` (also as `answer` and `solution`), `extra_info` and each of its fields by
its own name. `completion_ids`, `trainer_state`, `log_extra` and `log_metric` are there for who names them. A function
that has no `**columns` is given what it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from paddock.rewards.custom import Target, batch_scorer, blaming, finished, function_of, listed, load_batch, told
from paddock.rewards.score import Score, ScoreRequest, checked
from paddock.rewards.signature import COLUMNS as ARGUMENTS
from paddock.rewards.signature import TRUTHS, parameters_of, signature_of, takes_columns, takes_fields

DOES_NOT_APPLY = Score(0.0, applies=False)


@dataclass(frozen=True)
class TrainerState:
    """What TRL's `trainer_state` says of a run's progress."""

    global_step: int
    """Training steps that are done."""
    max_steps: int


COLUMNS, ENVIRONMENTS, FIELDS, ROW = "columns", "environments", "fields", "row"
"""How functions are called: with columns of a batch (TRL's contract), with these and the environments of conversations,
with fields of a row, or in our own form."""


def shape_of(function: Callable[..., Any]) -> str:
    """Returns how a function is called; its signature tells."""
    if takes_columns(function):
        return ENVIRONMENTS if ENVIRONMENTS in parameters_of(function) else COLUMNS
    return FIELDS if takes_fields(function) else ROW


def load_whole(target: Target) -> Callable[[Sequence[ScoreRequest]], Any]:
    """Returns the function that scores a batch; asked about no response, it tells its shape."""
    shape = shape_of(function_of(target))

    def answer(requests: Sequence[ScoreRequest]) -> Any:
        if not requests:
            return shape
        return (load_columns if shape in (COLUMNS, ENVIRONMENTS) else load_batch)(target)(requests)

    return answer


@lru_cache(maxsize=128)
def load_columns(target: Target) -> Callable[[Sequence[ScoreRequest]], list[Score]]:
    return column_scorer(target)


def whole_scorer(target: Target) -> Callable[[Sequence[ScoreRequest]], list[Score]]:
    """Returns the function that scores a batch, held by nobody else."""
    return (column_scorer if takes_columns(function_of(target)) else batch_scorer)(target)


def column_scorer(target: Target) -> Callable[[Sequence[ScoreRequest]], list[Score]]:
    function = function_of(target)
    signature = signature_of(function)
    signature.require_use(target.kwargs)

    def scores(requests: Sequence[ScoreRequest]) -> list[Score]:
        logged: dict[str, list[Any]] = {}
        given = {**arguments_of(requests), **logging_into(logged, len(requests)), **target.kwargs}
        signature.require(given, ARGUMENTS)
        with blaming(target):
            results = listed(finished(function(**signature.taken(given))), len(requests))
        for row, result in enumerate(results):
            with blaming(target, row):
                score = DOES_NOT_APPLY if result is None else checked(result)
                extras = checked({"score": 0.0, **{name: values[row] for name, values in logged.items()}}).extras
                results[row] = replace(score, extras={**score.extras, **extras})
        return results

    return scores


def arguments_of(requests: Sequence[ScoreRequest]) -> dict[str, Any]:
    """A row without a field that another row has gives None there."""
    fields = dict.fromkeys(name for request in requests for name in request.extra_info)
    truths = [request.ground_truth for request in requests]
    objects = [request.environment for request in requests]
    return {
        **dict.fromkeys(TRUTHS, truths),
        **{name: [request.extra_info.get(name) for request in requests] for name in fields},
        "data_source": [request.data_source for request in requests],
        "ground_truth": truths,
        "extra_info": [told(request) for request in requests],
        "prompts": [request.prompt for request in requests],
        "completions": [completion_of(request) for request in requests],
        "completion_ids": [list(request.tokens) for request in requests],
        "trainer_state": TrainerState(*requests[0].steps),
        **({ENVIRONMENTS: objects} if any(one is not None for one in objects) else {}),
    }


def completion_of(request: ScoreRequest) -> Any:
    """The response as TRL has it: a text after a text, else the messages behind the prompt."""
    if isinstance(request.prompt, str):
        return request.solution
    if request.turns is not None:
        return [dict(message) for message in request.turns]
    return [{"role": "assistant", "content": request.solution}]


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
