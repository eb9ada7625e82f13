"""A text for each of many rows, of which few are different: kept as numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np


class Labels(Sequence[str]):
    """Reads as a list of texts and takes four bytes for each."""

    def __init__(self, names: Sequence[str], codes: np.ndarray):
        self.names, self.codes = [sys.intern(str(name)) for name in names], codes

    @classmethod
    def of(cls, texts: Iterable[str], count: int) -> Labels:
        numbers: dict[str, int] = {}
        codes = np.fromiter((numbers.setdefault(text, len(numbers)) for text in texts), np.int32, count)
        return cls(list(numbers), codes)

    @classmethod
    def joined(cls, parts: Sequence[Labels]) -> Labels:
        names = list(dict.fromkeys(name for part in parts for name in part.names))
        places = [np.array([names.index(name) for name in part.names], np.int32) for part in parts]
        codes = [place[part.codes] for place, part in zip(places, parts, strict=True) if len(part)]
        return cls(names, np.concatenate(codes) if codes else np.zeros(0, np.int32))

    def counts(self, rows: np.ndarray) -> dict[str, int]:
        """Returns how many of these rows have each text, in order of first appearance."""
        found = np.bincount(self.codes[rows], minlength=len(self.names))
        return {name: int(number) for name, number in zip(self.names, found, strict=True) if number}

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: Any) -> Any:
        codes = self.codes[index]
        return self.names[codes] if np.ndim(codes) == 0 else [self.names[code] for code in codes]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
