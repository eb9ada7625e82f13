"""How long every prompt is, in tokens. Found once for a data set and a tokenizer, and kept on disk."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paddock.core.cache import cache_folder
from paddock.data.kept import read_whole, write_whole
from paddock.data.processes import over_ranges


def prompt_lengths(
    count: int, lengths_of: Callable[[range], list[int]], workers: int, identity: bytes | None
) -> np.ndarray:
    """The length of each of `count` prompts; `lengths_of` measures some of them.

    `identity` stands for all that decides the answer; equal ones share it through the cache, None is never cached.
    """
    file = identity and cache_folder("prompts") / f"{identity.hex()}.lengths"
    if file and (payload := read_whole(file)) is not None and len(payload) == 4 * count:
        return np.frombuffer(payload, dtype="<i4")
    found = np.fromiter(over_ranges(count, lengths_of, "measuring prompts", workers), dtype=np.int32, count=count)
    if file:
        write_whole(file, found.astype("<i4").tobytes())
    return found
