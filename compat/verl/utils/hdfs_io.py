"""Files under verl's names, as its data programs call them. They are local: HDFS is not written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from paddock.errors import UserError

HDFS = "hdfs://"


def exists(path: str, **kwargs: Any) -> bool:
    return os.path.exists(_local(path))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    os.makedirs(_local(name), mode, exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> bool:
    """Copies a file or a folder; True if it is there afterwards."""
    source, target = Path(_local(src)), Path(_local(dst))
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)
    return target.exists()


def _local(path: str) -> str:
    if str(path).startswith(HDFS):
        raise UserError("HDFS is not written", key="path", value=path, fix="a local folder, then `hdfs dfs -put`")
    return str(path)


__all__ = ["copy", "exists", "makedirs"]
