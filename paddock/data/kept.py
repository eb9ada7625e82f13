"""Results that are kept on disk between runs, each under a name that stands for all that decides it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from paddock.core.cache import cache_folder
from paddock.core.files import whole_file

CHECKSUM = 32  # bytes
Arrays = dict[str, np.ndarray]


def kept_arrays(kind: str, identity: bytes, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` returned for this identity before; else those that it returns now, which are kept."""
    file = cache_folder(kind) / f"{identity.hex()}.npz"
    content = read_whole(file)
    if content is not None:
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    made = make()
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **made)
    write_whole(file, packed.getvalue())
    return made


def read_whole(file: Path) -> bytes | None:
    """Returns the content of a kept file; None unless it is whole: a checksum guards against a torn or rotten one."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    checksum, payload = content[:CHECKSUM], content[CHECKSUM:]
    return payload if hashlib.sha256(payload).digest() == checksum else None


def write_whole(file: Path, payload: bytes) -> None:
    """Keeps the content. A folder that cannot be written costs time at the next start, not the run."""
    with suppress(OSError), whole_file(file) as stream:
        stream.write(hashlib.sha256(payload).digest() + payload)


def file_digest(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
