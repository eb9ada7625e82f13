"""Checks on a whole config, one function per rule (form.py). Each names the key, the value, the reason and the fix."""

from __future__ import annotations

from paddock.config import tree
from paddock.config.schema import Config
from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.loading.rules import algorithm, devices, distillation, machine, rewards, rollout  # noqa: F401
from paddock.loading.rules.distillation import served_teachers
from paddock.loading.rules.form import Scope, broken, require, rule
from paddock.loading.rules.limits import outside, unknown
from paddock.loading.rules.run import absent_plugins
from paddock.loading.rules.unread import done_otherwise, set_by_user, small_models_learn_slowly, without_effect

__all__ = ["Scope", "broken", "check", "check_limits", "require", "rule", "set_by_user", "unknown"]


def check_limits(config: Config) -> None:
    """Raises for the first key whose value, or an item of it, is outside the schema's limits."""
    for leaf in tree.leaves().values():
        value = tree.get(config, leaf.key)
        for item in value if isinstance(value, list) else [value]:
            if item is None or (reason := outside(item, leaf.metadata)) is None:
                continue
            choices = leaf.metadata.get("choices")
            fix = suggest(item, [*choices]) if choices else f"{leaf.key}: {leaf.metadata['meaning']}"
            raise UserError(reason, key=leaf.key, value=item, fix=fix)


def check(config: Config, origins: dict[str, str], here: bool = True, trains: bool = True) -> list[str]:
    """Raises the first broken rule; returns warnings for what is allowed but seldom meant.

    `here`: Python files that the run imports must be on this machine; a wrong path is the commonest mistake. `trains`:
    False if the command only answers.
    """
    require(config, Scope.ALL, *[Scope.UPDATES] if trains else [])
    absent = [*absent_plugins(config)]
    if here and absent:
        raise absent[0]
    missing = [f"{error.key}: {error.value} is not on this machine" for error in absent]
    slow = small_models_learn_slowly(config, origins) if trains else ()
    unread = without_effect(config, origins)
    return [*missing, *done_otherwise(config), *unread, *slow, *served_teachers(config)]
