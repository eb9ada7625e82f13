"""Files and folders that are the old ones or the complete new ones, and the error if a disk refuses them."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from paddock.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSALS = (*FULL, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def replacing(path: Path, key: str) -> Iterator[BinaryIO]:
    """Opens a file that takes the name `path` once it is whole and on disk; `key` is the setting that names its folder,
    for the message if the disk refuses it."""
    try:
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise unwritable(path.parent, key, error) from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the name `path` once it is whole and on disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_behind(path)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_left_behind(path: Path) -> None:
    """Removes unfinished files of this name whose writers were killed."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        writer = temporary.name.removesuffix(".tmp").rpartition(".")[2]
        if writer.isdigit() and not Path("/proc", writer).exists() and Path("/proc/self").exists():
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Puts a file on the disk, or the names in a folder: they are there only once the folder itself is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_folder(path: str | Path, key: str, *, replace: bool = False) -> Iterator[Path]:
    """Makes a folder to write into, which takes the name `path` when the block ends; if it raises, nothing is left.

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
        raise unwritable(target, key, error) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def make_folder(folder: Path, key: str, target: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:  # whatever the reason is, also one that elsewhere would be a bug: no such file
        raise unwritable(target, key, error) from error


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
        sync(path)


def unwritable(folder: Path, key: str, error: Exception) -> UserError:
    """Returns the error of a folder that the disk refuses to write, with the remedy for its reason."""
    number = getattr(error, "errno", None)
    reason, remedy = f"cannot be written: {getattr(error, 'strerror', None) or error}", "make it writable"
    if number in FULL:
        remedy = f"free space on its disk ({free(folder)})"
    elif number == errno.EFBIG:
        reason, remedy = "cannot be written: a file would be larger than this process may write", "ulimit -f unlimited"
    elif number == errno.ENOENT:
        reason, remedy = "was moved or removed while the run wrote into it", "put it back and start the command again"
    return UserError(reason, key=key, value=folder, fix=f"{remedy}, or set {key} to another folder")


def free(folder: Path) -> str:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return f"{shutil.disk_usage(there).free / 1024**3:.1f} GiB are free"
