"""Folders of models that are whole or not there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from paddock.errors import UserError

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR)


@contextmanager
def whole_folder(path: str | Path, key: str, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into, which takes the name `path` once the block has ended; if it raises, nothing is left.

    What is there already is an error, or with `replace` stays until the new one is whole. `key` names the folder.
    """
    target = Path(os.path.abspath(Path(path).expanduser()))
    if not replace:
        require_absent(target, key)
    writing, replaced = (target.with_name(f".{target.name}.{state}") for state in ("writing", "replaced"))
    try:
        for leftover in (writing, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        make_folder(writing, key, target)
        yield writing
        settle(writing)
        if target.exists():
            target.rename(replaced)
        writing.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno not in REFUSALS:
            raise
        raise unwritable(error, key, target) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def make_folder(folder: Path, key: str, target: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:  # whatever the reason is, also one that elsewhere would be a bug: no such file
        raise unwritable(error, key, target) from error


def unwritable(error: Exception, key: str, target: Path) -> UserError:
    reason = f"cannot be written: {getattr(error, 'strerror', None) or error}"
    return UserError(reason, key=key, value=target, fix="free space or name another folder")


def require_absent(target: Path, key: str) -> None:
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        reason = "is a file" if target.is_file() else "is there already, and holds something"
        raise UserError(reason, key=key, value=target, fix="remove it, or name another folder")


def settle(folder: Path) -> None:
    """Puts files and their names on the disk: a rename must not arrive there before what it names. Whoever may look
    into the folder may read its files, which libraries write for their owner alone."""
    for path in (*folder.rglob("*"), folder):
        if path.is_file():
            path.chmod(folder.stat().st_mode & 0o666)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
