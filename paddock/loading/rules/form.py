"""The one form of a rule: a function that raises a UserError with key, value, reason and fix where a config breaks it.

Its decorator says who asks. The modules of this package are rules by subject; a module of a command may add its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar, overload

from paddock.config.schema import Config
from paddock.errors import UserError
from paddock.facts.machine import Machine


class Scope(Enum):
    """Who asks whether a rule is kept."""

    ALL = auto()
    """Every command that loads a config, a plan too."""
    UPDATES = auto()
    """The same, but for commands that only answer."""
    TRAINING = auto()
    """Training refuses it and a plan shows it, so that a launch script is planned before every part of it is built."""
    SCORING = auto()
    """As TRAINING, and asked by `eval`, too."""
    MACHINE = auto()
    """As TRAINING, by what this machine has: a plan may be for another."""
    ALONE = auto()
    """The commands beside `train`: what only reinforcement learning has."""


OfConfig = Callable[[Config], None]
OfMachine = Callable[[Config, Machine], None]
C = TypeVar("C", OfConfig, OfMachine)


@dataclass(frozen=True)
class Rule:
    """Holds a function that checks a config, and who asks it."""

    check: Callable[..., None]
    scope: Scope


RULES: list[Rule] = []
"""In the order in which they are asked: the first that is broken is reported."""


@overload
def rule(scope: C, /) -> C: ...
@overload
def rule(scope: Scope, /) -> Callable[[C], C]: ...
def rule(scope: C | Scope, /) -> C | Callable[[C], C]:
    """Registers a rule, for every command unless a scope is given. A rule of MACHINE gets the machine, too."""
    if not isinstance(scope, Scope):
        return rule(Scope.ALL)(scope)

    def register(check: C) -> C:
        RULES.append(Rule(check, scope))
        return check

    return register


def broken(config: Config, *scopes: Scope, machine: Machine | None = None) -> Iterator[UserError]:
    """Yields an error for each rule of these scopes that the config breaks."""
    for one in RULES:
        if one.scope in scopes:
            try:
                one.check(*(config, machine) if one.scope is Scope.MACHINE else (config,))
            except UserError as error:
                yield error


def require(config: Config, *scopes: Scope, machine: Machine | None = None) -> None:
    """Raises the first error of these scopes."""
    for error in broken(config, *scopes, machine=machine):
        raise error
