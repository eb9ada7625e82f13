"""Arrays that are kept on disk between runs, each under a name that stands for all that decides them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from paddock.core.files import whole_file
from paddock.facts.machine import cache_folder

Arrays = dict[str, np.ndarray]


def kept_arrays(kind: str, decided: bytes | None, make: Callable[[], Arrays]) -> Arrays:
    """Returns the arrays that `make` returned before; else those that it returns now, which are kept.

    `decided` is all that decides them; None if that cannot be told: such arrays are made each time. A folder that
    cannot be written costs time, not the run.
    """
    if decided is None:
        return make()
    file = cache_folder(kind) / f"{hashlib.sha256(decided).hexdigest()}.npz"
    # A file may be missing, torn or rotten: numpy reads nothing whose checksum is wrong.
    with suppress(Exception), np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)
    made = make()
    with suppress(OSError), whole_file(file) as stream:
        np.savez(stream, allow_pickle=False, **made)
    return made


def file_digest(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
