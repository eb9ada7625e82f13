"""Paths in a config: one or a list, with `~` and `$VARS`, on disk or built into the package."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from paddock.errors import UserError
from paddock.facts.models import BUILTIN as BUILTIN

LONGEST_PATH, LONGEST_NAME = 4095, 255  # bytes


def expand(path: str) -> str:
    """Returns the path with `~` and `$VARS` replaced; `~` stays where no user could have the name behind it."""
    path = os.path.expandvars(path)
    try:
        return os.path.expanduser(path)
    except ValueError:  # a null byte
        return path


def expanded(key: str, path: str) -> str:
    """`expand`, and an error if no file system could have such a name: the calls of pathlib would raise later."""
    full = expand(path)
    try:
        name = os.fsencode(full)
    except ValueError:  # half of a surrogate pair
        name = b"\0"
    if b"\0" in name or len(name) > LONGEST_PATH or max(map(len, name.split(b"/"))) > LONGEST_NAME:
        reason = f"is no path: a path has at most {LONGEST_PATH} bytes, a name in it {LONGEST_NAME}, and none is zero"
        raise UserError(reason, key=key, value=f"{path!r:.80}", fix="check the path")
    return full


def files_of(value: Any) -> list[str]:
    """Returns the files of a key: one path or a list of them."""
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [] if value is None else [str(value)]


def missing_file(key: str, path: str, fix: str | None = None) -> UserError:
    """Says why `path` is no file that can be read: it is a folder, it is closed, or it is not there."""
    file, folder = Path(path), Path(path).parent
    if os.path.isdir(file):
        held = [name for name in names_in(file) if os.path.isfile(file / name)]
        fix = f"name the file: {file / held[0]}" if held else "name a file"
        return UserError("is a folder, not a file", key=key, value=path, fix=fix)
    if refusal := refused(file):
        return UserError(f"cannot be read: {refusal}", key=key, value=path, fix="make it readable, or name another")
    near = difflib.get_close_matches(file.name, names_in(folder), n=1)
    reason = "no such file" if os.path.isdir(folder) else f"no such file: there is no folder {folder}"
    meant = f"did you mean {folder / near[0]}?" if near else fix or "check the path"
    return UserError(reason, key=key, value=path, fix=meant)


def missing_folder(key: str, path: str, fix: str) -> UserError:
    """Says why `path` is no folder that can be read."""
    if os.path.isfile(path):
        return UserError("is a file, not a folder", key=key, value=path, fix=f"name its folder: {Path(path).parent}")
    if refusal := refused(Path(path)):
        return UserError(f"cannot be read: {refusal}", key=key, value=path, fix="make it readable, or name another")
    return UserError("no such folder", key=key, value=path, fix=fix)


def refused(path: Path) -> str | None:
    """Returns the operating system's reason if it denies access to a path; None if the path exists or does not."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # a closed folder, a name that is too long, a null byte
        return getattr(error, "strerror", None) or str(error)
    return None


def names_in(folder: Path) -> list[str]:
    """Returns the names in a folder; none if it is not there, or may not be read."""
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []
