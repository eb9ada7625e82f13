"""Records of a run, one line each, that survive a crash: metrics.jsonl (every step) and samples.jsonl (a few answers).

Both are always written; other loggers may lose records.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from paddock.core.files import replacing, unwritable
from paddock.runs.reading import record_of
from paddock.runs.samples import Sample, plain

KEY = "trainer.default_local_dir"
SHOWN = 6
"""Responses of a step in samples.jsonl."""
LONGEST = {"prompt": 2000, "answer": 4000, "ground_truth": 500}
"""Characters of each text in samples.jsonl; what lies between the beginning and the end is left out."""


class Ledger:
    """A file of lines that each carry a step, in the order of steps. A resumed run drops the lines beyond its
    checkpoint and any torn one; a new run moves the file of an older one aside."""

    stem: ClassVar[str]

    def __init__(self, folder: Path, resumed: int | None = None):
        self.path = folder / f"{self.stem}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resumed is None:
                self._set_aside()
            elif self.path.exists():
                self._keep(resumed)
        except OSError as error:
            raise unwritable(folder, KEY, error) from error

    @cached_property
    def file(self) -> io.FileIO:
        try:
            return self.path.open("ab", buffering=0)
        except OSError as error:
            raise unwritable(self.path.parent, KEY, error) from error

    def close(self) -> None:
        if "file" in self.__dict__:
            self.file.close()
            del self.file

    def append(self, record: Mapping[str, Any]) -> None:
        line = to_line(record)
        try:
            if self.file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise unwritable(self.path.parent, KEY, error) from error

    def size(self) -> int:
        """Returns the file's bytes; refuses to go on where the file is gone."""
        try:
            return self.path.stat().st_size
        except OSError as error:
            raise unwritable(self.path.parent, KEY, error) from error

    def kept(self, record: dict[str, Any], start: int) -> None:
        """Learns of a line, `start` bytes into the file, that was there before this run."""

    def _keep(self, last: int) -> None:
        """Reads the lines up to this step and cuts the file after them."""
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            record = record_of(line)
            if record is None or record["step"] > last or not line.endswith(b"\n"):
                break
            self.kept(record, end)
            end += len(line)
        self.file.truncate(end)

    def _set_aside(self) -> None:
        if self.path.exists() and self.path.stat().st_size:
            number = 1
            while (aside := self.path.with_name(f"{self.stem}.{number}.jsonl")).exists():
                number += 1
            self.path.rename(aside)


class MetricsFile(Ledger):
    """Writes metrics.jsonl: a step has one line; metrics of a step that is logged again are merged into its line."""

    stem = "metrics"

    def __init__(self, folder: Path, resumed: int | None = None):
        self.step: int | None = None  # of the last line
        self.metrics: dict[str, Any] = {}  # in the last line
        self.before = 0  # bytes before the last line
        super().__init__(folder, resumed)
        self.file.flush()  # a folder that cannot be written is refused now

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: finite(value) for name, value in metrics.items()}
        if step == self.step:
            self.metrics |= numbers
            self._replace_last()
        else:
            self.step, self.metrics, self.before = step, {"step": step, **numbers}, self.size()
            self.append(self.metrics)

    def kept(self, record: dict[str, Any], start: int) -> None:
        self.step, self.metrics, self.before = record["step"], record, start

    def _replace_last(self) -> None:
        """Replaces the file by a new one: a line overwritten in place would be lost if the process was killed."""
        with replacing(self.path, KEY) as file:
            file.write(self.path.read_bytes()[: self.before] + to_line(self.metrics))
        self.close()


class SamplesFile(Ledger):
    """Writes samples.jsonl: a few responses of training (`rollout`) and validation, a line per step and source."""

    stem = "samples"

    def __init__(self, folder: Path, resumed: int | None = None):
        self.written: set[tuple[int, str]] = set()
        super().__init__(folder, resumed)

    def log(self, step: int, source: str, samples: Sequence[Sample]) -> None:
        """Writes the line of this step and source, unless there is one: a validation may be repeated after a crash."""
        if (step, source) not in self.written and samples:
            self.append({"step": step, "source": source, "samples": [shown(sample) for sample in samples]})
            self.written.add((step, source))

    def kept(self, record: dict[str, Any], start: int) -> None:
        self.written.add((record["step"], record["source"]))


def worth_keeping(number: int) -> bool:
    """True for 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: two of each doubling, so that their count grows like the log."""
    return number.bit_count() <= 1 or (number.bit_count() == 2 and (number & (number >> 1)) != 0)


def evenly(samples: Sequence[Any], count: int) -> list[Any]:
    """Returns `count` of the samples, evenly spaced; all of them if there are fewer."""
    count = min(count, len(samples))
    return [samples[i * len(samples) // count] for i in range(count)]


def shown(sample: Sample) -> dict[str, Any]:
    """Returns a sample as samples.jsonl has it: long texts shortened, and of the extras the scorer's numbers."""
    truth = sample.ground_truth
    record = {**vars(sample), "ground_truth": truth if truth is None or isinstance(truth, str) else to_text(truth)}
    for name, longest in LONGEST.items():
        if record[name] is not None:
            record[name] = shorten(record[name], longest)
    kept = {name: value for name, value in sample.extras.items() if isinstance(value, int | float)}
    record["extras"] = {name: finite(value) for name, value in kept.items() if name not in ("score", "index")}
    return record


def finite(value: float) -> float | None:
    """Returns None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_text(value: Any) -> str:
    return json.dumps(value, default=plain)


def shorten(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    head, tail = longest * 3 // 4, longest // 4
    return f"{text[:head]}\n[... {len(text) - head - tail:,} characters left out ...]\n{text[-tail:]}"


def to_line(record: Mapping[str, Any]) -> bytes:
    return to_text(record).encode() + b"\n"
