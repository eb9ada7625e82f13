"""Compares our problems with a test set that models shall not have been trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paddock.data.prepare.records import read_file
from paddock.errors import UserError

RUN = 8
"""Words in a row that no problem of ours may share with one of the test set."""

Words = tuple[str, ...]


def words_of(prompt: str) -> Words:
    """Without numbers, which examples have by chance, and without lines that import something."""
    return tuple(re.findall(r"[a-z]+", re.sub(r"(?m)^(from|import) .*", "", prompt).lower()))


def runs(prompts: Iterable[str], length: int) -> set[Words]:
    """All parts of `length` words in a row."""
    texts = map(words_of, prompts)
    return {text[start : start + length] for text in texts for start in range(len(text) - length + 1)}


def longest_shared(ours: list[str], theirs: list[str], most: int) -> Words:
    """The longest run of words, of at most `most`, that both have; of several one that is first alphabetically."""
    longest: Words = ()
    for length in range(1, most + 1):
        shared = runs(ours, length) & runs(theirs, length)
        if not shared:
            break
        longest = min(shared)
    return longest


def compared(ours: Mapping[str, set[str]], file: Path) -> dict[str, Any]:
    """What our problems, name -> prompts, share with the records of `file`; a UserError if it is too much."""
    records = read_file(file, "--held-out")
    theirs = [record.text("prompt") for record in records]
    fix = "reword the family or rename its function"
    if names := sorted({record.text("entry_point") for record in records} & ours.keys()):
        raise UserError(f"has functions of the same names: {', '.join(names)}", key="--held-out", value=file, fix=fix)
    longest = longest_shared([prompt for prompts in ours.values() for prompt in prompts], theirs, RUN)
    if len(longest) >= RUN:
        reason = f"shares {RUN} words in a row with our problems: {' '.join(longest)}"
        raise UserError(reason, key="--held-out", value=file, fix=fix)
    return {
        **{"problems": len(records), "shared_names": 0, "run": RUN, "shared_runs": 0},
        **{"longest_run": len(longest), "longest_run_words": " ".join(longest)},
    }
