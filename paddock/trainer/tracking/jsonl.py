"""metrics.jsonl: one line a step, always written, the record that other loggers may lose."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddock.trainer.files import replacing, unwritable

KEY = "trainer.default_local_dir"


class MetricsFile:
    """A step has one line, whatever happens: one that is logged again is merged into its line, a resumed run drops the
    lines beyond its checkpoint and any torn one, and a new run moves the file of an older one aside."""

    def __init__(self, folder: Path, resumed: int | None = None):
        self.path = folder / "metrics.jsonl"
        self.step: int | None = None  # of the last line
        self.metrics: dict[str, Any] = {}  # in the last line
        self.before = 0  # bytes before the last line
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resumed is None:
                self._set_aside()
            self.file = self.path.open("ab", buffering=0)
            self._keep(-1 if resumed is None else resumed)
        except OSError as error:
            raise unwritable(folder, KEY, error) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        if step == self.step:
            self.metrics |= finite
            self._replace_last()
        else:
            self.step, self.metrics, self.before = step, {"step": step, **finite}, self.path.stat().st_size
            line = to_line(self.metrics)
            try:
                if self.file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise unwritable(self.path.parent, KEY, error) from error

    def close(self) -> None:
        self.file.close()

    def _replace_last(self) -> None:
        """Through a new file: a line that is overwritten in place is lost if the process is killed meanwhile."""
        with replacing(self.path, KEY) as file:
            file.write(self.path.read_bytes()[: self.before] + to_line(self.metrics))
        self.file.close()
        self.file = self.path.open("ab", buffering=0)

    def _keep(self, last: int) -> None:
        """Reads the lines up to this step and cuts the file after them."""
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            record = parse(line)
            if record is None or record["step"] > last:
                break
            self.step, self.metrics, self.before = record["step"], record, end
            end += len(line)
        self.file.truncate(end)

    def _set_aside(self) -> None:
        if self.path.exists() and self.path.stat().st_size:
            number = 1
            while (aside := self.path.with_name(f"metrics.{number}.jsonl")).exists():
                number += 1
            self.path.rename(aside)


def to_line(metrics: Mapping[str, Any]) -> bytes:
    return json.dumps(metrics).encode() + b"\n"


def parse(line: bytes) -> dict[str, Any] | None:
    """A complete record, or None."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole else None
