"""Plug-ins of the program that runs: scorers and loggers by decorator. Estimators and losses have theirs beside them
(`paddock.estimator`, `paddock.policy_loss`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paddock.config.loggers import LOGGERS, LoggerKind

F = TypeVar("F", bound=Callable[..., Any])

SCORERS: dict[str, Callable[..., Any]] = {}
"""Functions that `Run(reward="name")` finds before it looks for a rule of that name."""


def scorer(name: str) -> Callable[[F], F]:
    """Registers a function as the reward of this name.

    >>> @scorer("short")
    ... def short(completion: str) -> float:
    ...     return 1.0 / (1 + len(completion))

    It is called with what it names: `completion`, `prompt`, `ground_truth`, and the row's columns.
    """

    def file(function: F) -> F:
        SCORERS[name] = function
        return function

    return file


def logger(name: str) -> Callable[[F], F]:
    """Registers a class, or a function that makes an object, as the logger of this name, for `Run(logger=[name])`.

    >>> @logger("rewards")
    ... class Rewards:
    ...     run_id = None
    ...     def __init__(self, run):  # a LoggedRun: project, name, folder, settings, total_steps
    ...         self.seen = []
    ...     def log(self, step, metrics):
    ...         self.seen.append((step, metrics.get("critic/score/mean")))
    ...     def generations(self, step, samples):
    ...         pass
    ...     def close(self):
    ...         pass
    """

    def file(make: F) -> F:
        LOGGERS[name] = LoggerKind(make)
        return make

    return file
