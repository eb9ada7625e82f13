"""Data files as tables of rows that are parsed one at a time: parquet stays in Arrow, JSON stays text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddock.config.paths import BUILTIN
from paddock.data import rows as files
from paddock.data.builtin import builtin_rows
from paddock.errors import UserError

Record = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """The rows of one file."""

    path: str
    columns: list[str]
    count: int
    row: Callable[[int], Record]
    records: Callable[[Sequence[str]], Iterable[Record]]
    """All rows in order, with these columns only."""
    digest: Callable[[], bytes]
    """Of the content: a file that moved is the same file, one that was rewritten is another."""

    def place(self, row: int) -> str:
        """What an error message names: `train.parquet row 12`."""
        return f"{self.path} row {row}"


def bad_row(place: str, column: str, reason: str, fix: str) -> UserError:
    return UserError(reason, key=f"{place}, column {column!r}", fix=fix)


def open_table(path: str, key: str, wanted: Sequence[str]) -> Table:
    """`key` is the config key that names the file; of a parquet file only the `wanted` columns are read."""
    if path.startswith(BUILTIN):
        return _json_table(path, [json.dumps(row).encode() for row in builtin_rows(path)])
    file = Path(path).expanduser()
    if file.suffix == ".parquet":
        return _arrow_table(path, key, files.columns(path, key=key), wanted)
    files.count_rows(path, key=key)  # answers a file that is not there or no data file
    if file.suffix == ".json":
        return _json_table(path, [json.dumps(record).encode() for record in json.loads(file.read_bytes())])
    return _json_table(path, [line for line in file.read_bytes().split(b"\n") if line.strip()])


def _arrow_table(path: str, key: str, columns: list[str], wanted: Sequence[str]) -> Table:
    from pyarrow import parquet  # rows of JSON do without it: 28 MiB

    file = Path(path).expanduser()
    try:
        table = parquet.read_table(file, columns=[column for column in columns if column in wanted])
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        reason = f"the file cannot be read: {str(error).splitlines()[0]}"
        raise UserError(reason, key=key, value=path, fix="write the file again") from error

    def row(index: int) -> Record:
        return table.slice(index, 1).to_pylist()[0]

    def records(names: Sequence[str]) -> Iterator[Record]:
        for batch in table.select(names).to_batches(max_chunksize=4096):
            yield from batch.to_pylist()

    def digest() -> bytes:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()

    return Table(path, columns, table.num_rows, row, records, digest)


def _json_table(path: str, lines: list[bytes]) -> Table:
    """Arrow's own JSON reader is not used: it takes texts for dates, and wants one type in a column."""
    columns = {column: None for number, line in enumerate(lines) for column in _parse(path, number, line)}

    def row(index: int) -> Record:
        return _parse(path, index, lines[index])

    def records(names: Sequence[str]) -> Iterator[Record]:
        return ({name: record.get(name) for name in names} for record in map(row, range(len(lines))))

    def digest() -> bytes:
        return hashlib.sha256(b"\n".join(lines)).digest()

    return Table(path, list(columns), len(lines), row, records, digest)


def _parse(path: str, number: int, line: bytes) -> Record:
    place = f"{path} row {number}"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}", key=place, fix="mend or remove it") from error
    if not isinstance(record, dict):
        raise UserError(f"a row must be a JSON object, not {record!r:.80}", key=place, fix="mend or remove it")
    return record
