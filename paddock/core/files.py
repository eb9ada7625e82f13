"""Files that are either the old ones or the complete new ones, and what to say when a disk refuses them."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from paddock.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSALS = (*FULL, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def replacing(path: Path, key: str) -> Iterator[BinaryIO]:
    """A file that takes the name `path` once it is whole and on disk; `key` is the setting that names its folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_behind(path)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise unwritable(path.parent, key, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_left_behind(path: Path) -> None:
    """Removes unfinished files of this name whose writers were killed."""
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        writer = temporary.name.removesuffix(".tmp").rpartition(".")[2]
        if writer.isdigit() and not Path("/proc", writer).exists() and Path("/proc/self").exists():
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Names in a folder are on the disk only once the folder itself is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(folder: Path, key: str, error: OSError) -> UserError:
    reason, remedy = f"cannot be written: {error.strerror or error}", "make it writable"
    if error.errno in FULL:
        remedy = f"free space on its disk ({free(folder)})"
    elif error.errno == errno.EFBIG:
        reason, remedy = "cannot be written: a file would be larger than this process may write", "ulimit -f unlimited"
    elif error.errno == errno.ENOENT:
        reason, remedy = "was moved or removed while the run wrote into it", "put it back and start the command again"
    return UserError(reason, key=key, value=folder, fix=f"{remedy}, or set {key} to another folder")


def free(folder: Path) -> str:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return f"{shutil.disk_usage(there).free / 1024**3:.1f} GiB are free"
