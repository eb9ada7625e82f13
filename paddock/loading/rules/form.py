"""The one form of a rule: a function that yields (key, reason, fix) where a config breaks it.

Its decorator says who asks. The modules of this package are rules by subject; a module of a command may add its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar, overload

from paddock.config import tree
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


Breach = tuple[str, str, str] | tuple[str, str, str, Any]
"""Key, reason, fix; and the value, if it is not what the config has under the key."""
OfConfig = Callable[[Config], Iterable[Breach] | None]
OfMachine = Callable[[Config, Machine], Iterable[Breach] | None]
C = TypeVar("C", OfConfig, OfMachine)


@dataclass(frozen=True)
class Rule:
    """Holds a function that checks a config, and who asks it."""

    check: Callable[..., Iterable[Breach] | None]
    scope: Scope

    def error(self, config: Config, machine: Machine | None = None) -> UserError | None:
        """Returns the first breach as an error; a function that reads a key may raise one of its own."""
        try:
            breaches = self.check(*(config, machine) if self.scope is Scope.MACHINE else (config,))
            for key, reason, fix, *own in breaches or ():
                return UserError(reason, key=key, value=own[0] if own else tree.get(config, key), fix=fix)
        except UserError as error:
            return error
        return None


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
    for rule in RULES:
        if rule.scope in scopes and (error := rule.error(config, machine)):
            yield error


def require(config: Config, *scopes: Scope, machine: Machine | None = None) -> None:
    """Raises the first error of these scopes."""
    for error in broken(config, *scopes, machine=machine):
        raise error
