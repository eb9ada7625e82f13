"""Imports packages that have environments: optional ones, so a missing one is named with how to install it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection
from types import ModuleType

from paddock.errors import UserError


def imported(module: str, package: str, environment: str) -> ModuleType:
    """Returns the module, which `pip install package` brings; `environment` is what was asked for."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        reason = f"needs the module {error.name}, which is not installed"
        raise UserError(reason, key="environment", value=environment, fix=f"pip install {package}") from error


def refused(environment: str, reason: str, fix: str) -> UserError:
    """Returns an error about the environment that the config names."""
    return UserError(reason, key="environment", value=environment, fix=fix)


def require_known(environment: str, name: str, known: Collection[str], owner: str) -> None:
    """Refuses a name that a package does not have, with the nearest ones: there may be hundreds."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=6, cutoff=0.3) or sorted(known)[:6]
        reason = f"{owner} has no {name!r}" if name else "does not say which one"
        raise refused(environment, reason, f"e.g. {', '.join(near)}; {owner} has {len(known)}")
