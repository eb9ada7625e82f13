"""How long every prompt is, in tokens. Found once for a data set and a tokenizer, and kept on disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from paddock.core.cache import cache_folder

CHUNK = 512
CHECKSUM = 32  # bytes


def prompt_lengths(
    count: int, lengths_of: Callable[[range], list[int]], workers: int, identity: bytes | None
) -> np.ndarray:
    """The length of each of `count` prompts; `lengths_of` measures some of them.

    `identity` stands for all that decides the answer; equal ones share it through the cache, None is never cached.
    Threads are enough: nearly all the time goes to the tokenizer's native code, which does not hold Python's lock.
    """
    file = identity and cache_folder("prompts") / f"{identity.hex()}.lengths"
    if file and (known := _read(file, count)) is not None:
        return known
    found = np.fromiter(_measure(count, lengths_of, workers), dtype=np.int32, count=count)
    if file:
        _write(file, found)
    return found


def _measure(count: int, lengths_of: Callable[[range], list[int]], workers: int) -> Iterator[int]:
    chunks = [range(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
    console = Console(stderr=True)
    with ThreadPoolExecutor(workers) as pool:
        try:
            done = pool.map(lengths_of, chunks)
            bar = track(done, "measuring prompts", total=len(chunks), console=console, transient=True,
                        disable=not console.is_terminal)  # fmt: skip
            for lengths in bar:
                yield from lengths
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _read(file: Path, count: int) -> np.ndarray | None:
    """None unless the file is whole: a checksum guards against a torn or rotten one."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    checksum, payload = content[:CHECKSUM], content[CHECKSUM:]
    if hashlib.sha256(payload).digest() != checksum or len(payload) != 4 * count:
        return None
    return np.frombuffer(payload, dtype="<i4")


def _write(file: Path, lengths: np.ndarray) -> None:
    """A cache that cannot be written costs time, not the run."""
    payload = lengths.astype("<i4").tobytes()
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
        temporary.replace(file)
