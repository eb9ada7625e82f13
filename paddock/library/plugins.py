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
    """Registers a function as the reward of this name, for `Run(reward=name)`.

    >>> import paddock
    >>> @paddock.scorer("short")
    ... def short(completion: str) -> float:
    ...     return 1.0 / (1 + len(completion))
    >>> run = paddock.Run(reward="short")

    It is called with what it names: `completion`, `prompt`, `ground_truth`, and the row's columns.
    """

    def file(function: F) -> F:
        SCORERS[name] = function
        return function

    return file


def logger(name: str) -> Callable[[F], F]:
    """Registers a class, or a function that makes an object, as the logger of this name, for `Run(logger=[name])`.

    >>> import paddock
    >>> @paddock.logger("rewards")
    ... class Rewards:
    ...     run_id = None
    ...
    ...     def __init__(self, run):  # project, name, folder, settings, total_steps
    ...         print("steps:", run.total_steps)
    ...
    ...     def log(self, step, metrics):
    ...         print(step, "critic/score/mean" in metrics)
    ...
    ...     def generations(self, step, samples):  # a few answers of each validation
    ...         pass
    ...
    ...     def close(self):
    ...         print("closed")
    >>> config = {"data.val_files": None}
    >>> with paddock.Run(n=2, batch=2, steps=1, logger=["rewards"], config=config) as run:
    ...     outcome = run.train()
    steps: 1
    1 True
    closed
    """

    def file(make: F) -> F:
        LOGGERS[name] = LoggerKind(make)
        return make

    return file
