"""Imports the modules of users that register estimators, losses and scorers."""

from __future__ import annotations

from paddock.facts.modules import MODULE, user_module


def import_plugin(name: str, key: str) -> None:
    """Imports the user's module `name`, which registers things; `key` is the setting that names it."""
    user_module(f"{MODULE}{name}", key, name)
