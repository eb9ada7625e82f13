"""Imports the modules of users that register estimators, losses and scorers."""

from __future__ import annotations

from paddock.errors import UserError
from paddock.facts.modules import module_named


def import_plugin(name: str, key: str) -> None:
    """Imports the user's module `name`, which registers things; `key` is the setting that names it."""
    try:
        module_named(name)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a user's module runs: SystemExit is as likely as SyntaxError
        reason = f"cannot be imported: {type(error).__name__}: {error}"
        fix = "a module that this Python imports: check its name, and PYTHONPATH"
        raise UserError(reason, key=key, value=name, fix=fix) from error
