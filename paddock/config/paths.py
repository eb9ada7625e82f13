"""Paths in a config: one or a list, with `~` and `$VARS`, on disk or built into the package."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from paddock.errors import UserError
from paddock.facts.models import BUILTIN as BUILTIN


def expand(path: str) -> str:
    return os.path.expanduser(os.path.expandvars(path))


def files_of(value: Any) -> list[str]:
    """One path or a list of them."""
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [] if value is None else [str(value)]


def missing_file(key: str, path: str, fix: str | None = None) -> UserError:
    folder = Path(path).parent
    near = []
    if folder.is_dir():
        near = difflib.get_close_matches(Path(path).name, [entry.name for entry in folder.iterdir()], n=1)
    reason = "no such file" if folder.is_dir() else f"no such file: there is no folder {folder}"
    return UserError(
        reason, key=key, value=path, fix=f"did you mean {folder / near[0]}?" if near else fix or "check the path"
    )
