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


def kept_arrays(kind: str, identity: bytes | None, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` returned for this identity before; else those that it returns now, which are kept.

    None stands for nothing: such arrays are made each time. A folder that cannot be written costs time, not the run.
    """
    if identity is None:
        return make()
    file = cache_folder(kind) / f"{identity.hex()}.npz"
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
