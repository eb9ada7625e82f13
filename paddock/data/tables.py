"""Data files as tables of rows that are parsed one at a time, and stay on disk: memory does not grow with rows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paddock.config.paths import BUILTIN
from paddock.core.cache import cache_folder
from paddock.core.files import whole_file
from paddock.data.builtin import builtin_rows
from paddock.data.kept import file_digest, kept_arrays
from paddock.data.processes import MANY, over_ranges
from paddock.errors import UserError
from paddock.facts import files
from paddock.facts.files import FileSource

Record = dict[str, Any]
SMALL = 16 * 2**20
"""Bytes of a file up to which its rows are held in memory, and nothing about it is kept on disk."""
BLOCK = 16 * 2**20
ROWS = 4096


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
    """Returns a hash of the content: a file that moved is the same file, one that was rewritten is another."""
    take: Callable[[Sequence[int], Sequence[str] | None], list[Record]] | None = None
    """Several rows at a time, maybe with some columns only, where that is faster."""

    def rows(self, indices: Sequence[int], names: Sequence[str] | None = None) -> list[Record]:
        """Rows by their numbers. With `names`, columns that are not among them may be missing."""
        return self.take(indices, names) if self.take else [self.row(index) for index in indices]

    def location(self, row: int) -> str:
        """Returns the row's location as error messages name it: `train.parquet row 12`."""
        return f"{self.path} row {row}"


def bad_row(location: str, column: str, reason: str, fix: str) -> UserError:
    return UserError(reason, key=f"{location}, column {column!r}", fix=fix)


def open_tables(path: str, key: str, wanted: Callable[[list[str]], Sequence[str]]) -> list[Table]:
    """Opens a table for each file that the path stands for; `key` is the config key that names it.

    Of a file's columns the `wanted` ones are read, where the format allows to leave others out.
    """
    if path.startswith(BUILTIN):
        return [_text_table(_builtin(path))]
    if files.hub_name(path):
        from paddock.data.hub import hub_sources

        found = hub_sources(path, key)
    else:
        found = files.sources(path, key)
    return [_open(source, key, wanted) for source in found]


@cache
def _builtin(name: str) -> Lines:
    return Lines(name, b"".join(json.dumps(row).encode() + b"\n" for row in builtin_rows(name)))


def _open(source: FileSource, key: str, wanted: Callable[[list[str]], Sequence[str]]) -> Table:
    with files.readable(source, key):
        if source.kind not in ("parquet", "arrow"):
            return _text_table(lines_of(source))
        columns = files.columns_of(source, key)
        used = set(wanted(columns))
        rows = ArrowRows(source, [column for column in columns if column in used])
        return Table(source.path, columns, rows.table.num_rows, rows.row, rows.records, rows.digest, rows.take)


def _text_table(lines: Lines) -> Table:
    return Table(lines.path, lines.columns, lines.count, lines.row, lines.records, lines.digest, lines.take)


class ArrowRows:
    """Rows of a parquet file or of one that `datasets` wrote.

    A parquet file cannot be read row by row. A large one is written as an Arrow file into the cache, once, and that is
    mapped into memory; so are files of `datasets`.
    """

    def __init__(self, source: FileSource, columns: list[str]):
        self.source, self.columns = source, columns

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "columns": self.columns}

    @cached_property
    def table(self) -> Any:
        import pyarrow as pa  # rows of text files do without it: 28 MiB
        from pyarrow import parquet

        file = self.source.file
        if self.source.kind == "arrow":
            with pa.memory_map(str(file)) as mapped:
                return pa.ipc.open_stream(mapped).read_all().select(self.columns)
        if file.stat().st_size <= SMALL and parquet.read_metadata(file).num_rows < MANY:
            return parquet.read_table(file, columns=self.columns)
        name = hashlib.sha256(self._content + "\0".join(self.columns).encode()).hexdigest()
        unpacked = cache_folder("rows") / f"{name}.arrow"
        if not unpacked.is_file():
            try:
                self._unpack(unpacked)
            except OSError:  # a cache that cannot be written costs memory, not the run
                return parquet.read_table(file, columns=self.columns)
        with pa.memory_map(str(unpacked)) as mapped:
            return pa.ipc.open_file(mapped).read_all()

    def _unpack(self, target: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        with parquet.ParquetFile(self.source.file) as packed, whole_file(target) as stream:
            schema = pa.schema([packed.schema_arrow.field(name) for name in self.columns])
            with pa.ipc.new_file(stream, schema) as writer:
                for batch in packed.iter_batches(batch_size=ROWS, columns=self.columns):
                    writer.write_batch(batch)

    @cached_property
    def _content(self) -> bytes:
        return file_digest(self.source.file)

    def row(self, index: int) -> Record:
        return self.table.slice(index, 1).to_pylist()[0]

    def take(self, indices: Sequence[int], names: Sequence[str] | None = None) -> list[Record]:
        first, count = (indices[0], len(indices)) if len(indices) else (0, 0)
        if list(indices) != list(range(first, first + count)):
            return [self.row(index) for index in indices]
        table = self.table if names is None else self.table.select([n for n in self.columns if n in names])
        return table.slice(first, count).to_pylist()

    def records(self, names: Sequence[str]) -> Iterator[Record]:
        for batch in self.table.select(names).to_batches(max_chunksize=ROWS):
            yield from batch.to_pylist()

    def digest(self) -> bytes:
        return self._content


def _blocks(count: int) -> Iterator[range]:
    return (range(start, min(start + ROWS, count)) for start in range(0, count, ROWS))


def lines_of(source: FileSource) -> Lines:
    """Opens a text file as lines. A large packed one, or a list of JSON, is unpacked into the cache, once."""
    if source.kind != "json" and not source.zipped:
        small = source.file.stat().st_size <= SMALL
        return Lines(source.path, source.file.read_bytes() if small else source.file, source)
    if source.file.stat().st_size <= SMALL // (8 if source.zipped else 1):
        return Lines(source.path, b"".join(_unpacked(source)), source)
    target = cache_folder("rows") / f"{file_digest(source.file).hex()}.{source.kind}.lines"
    try:
        if not target.is_file():
            with whole_file(target) as stream:
                stream.writelines(_unpacked(source))
        return Lines(source.path, target, source)
    except OSError:  # a cache that cannot be written costs memory, not the run
        return Lines(source.path, b"".join(_unpacked(source)), source)


def _unpacked(source: FileSource) -> Iterator[bytes]:
    """The content, a record of JSON on each line."""
    if source.kind == "json":
        yield from (json.dumps(record).encode() + b"\n" for record in files.json_list(source))
        return
    with files.opened(source) as stream:
        while block := stream.read(BLOCK):
            yield block


class Lines:
    """Rows of JSON or csv, read by their offsets in a file or in bytes.

    Arrow's own JSON reader is not used: it takes texts for dates, and wants one type in a column.
    """

    def __init__(self, path: str, content: Path | bytes, source: FileSource | None = None):
        self.path, self.content = path, content
        self.header: tuple[list[str], str] | None = None
        """Names and delimiter, of csv."""
        self._file: int | None = None
        self._stamp = self._stat()
        begins = self._read_header(source) if source and source.kind == "csv" else 0
        found = self._index(begins)
        self.starts, self.sizes, self._digest = found["starts"], found["sizes"], found["digest"].tobytes()
        self.columns: list[str] = self.header[0] if self.header else [str(name) for name in found["columns"]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    @property
    def count(self) -> int:
        return len(self.starts)

    def row(self, index: int) -> Record:
        return self._parse(index, self.line(index))

    def line(self, index: int) -> bytes:
        return self._read(int(self.starts[index]), int(self.sizes[index]))

    def lines(self, indices: Sequence[int]) -> list[bytes]:
        """Several lines; neighbours are read at once."""
        first, count = (indices[0], len(indices)) if len(indices) else (0, 0)
        if not count or list(indices) != list(range(first, first + count)):
            return [self.line(index) for index in indices]
        starts, sizes = self.starts[first : first + count], self.sizes[first : first + count]
        begin = int(starts[0])
        block = self._read(begin, int(starts[-1] + sizes[-1]) - begin)
        return [block[s : s + n] for s, n in zip((starts - begin).tolist(), sizes.tolist(), strict=True)]

    def take(self, indices: Sequence[int], names: Sequence[str] | None = None) -> list[Record]:
        return [self._parse(index, line) for index, line in zip(indices, self.lines(indices), strict=True)]

    def _read(self, start: int, size: int) -> bytes:
        if isinstance(self.content, bytes):
            return self.content[start : start + size]
        if self._file is None:
            self._file = os.open(self.content, os.O_RDONLY)
        if (stamp := self._stat()) != self._stamp:
            if file_digest(self.content) != self._content:
                raise UserError("the file changed while it was used", key=self.path, fix="start the run again")
            self._stamp = stamp  # it was only touched
        return os.pread(self._file, size, start)

    def records(self, names: Sequence[str]) -> Iterator[Record]:
        for rows in _blocks(self.count):
            yield from ({name: record.get(name) for name in names} for record in self.take(rows))

    def digest(self) -> bytes:
        return self._digest

    def _stat(self) -> tuple[int, int]:
        if isinstance(self.content, bytes):
            return len(self.content), 0
        found = os.stat(self.content) if self._file is None else os.fstat(self._file)
        return found.st_size, found.st_mtime_ns

    def _parse(self, index: int, line: bytes) -> Record:
        location = f"{self.path} row {index}"
        if self.header:
            return files.csv_record(self.header[0], files.one_csv_row(line.decode(), self.header[1]), location)
        return files.json_row(line, location)

    def _read_header(self, source: FileSource) -> int:
        with self._stream() as stream:
            self.header = files.csv_header(stream, source)
            return int(stream.tell())

    def _stream(self) -> Any:
        import io

        return io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content.open("rb")

    def _index(self, begins: int) -> dict[str, np.ndarray]:
        """Returns the start and length of each row, and the columns; kept for a large file."""
        if isinstance(self.content, bytes):
            return self._survey(begins)
        self._content = file_digest(self.content)
        identity = hashlib.sha256(b"lines 1" + bytes([self.header is None]) + self._content).digest()
        return kept_arrays("rows", identity, lambda: self._survey(begins))

    def _survey(self, begins: int) -> dict[str, np.ndarray]:
        self.starts, self.sizes = (self._csv_places if self.header else self._json_places)(begins)
        digest = hashlib.sha256("\0".join(self.header[0]).encode() + b"\n" if self.header else b"")
        for rows in _blocks(self.count):
            digest.update((b"\n" if rows.start else b"") + b"\n".join(self.lines(rows)))
        names = [] if self.header else [name for found in over_ranges(self.count, self.names_in) for name in found]
        return {
            "starts": self.starts,
            "sizes": self.sizes,
            "digest": np.frombuffer(digest.digest(), np.uint8),
            "columns": np.array(list(dict.fromkeys(names)), dtype=np.str_),
        }

    def names_in(self, rows: range) -> list[list[str]]:
        """The columns of these rows, as one list: each row is parsed, so that a broken one is named before training."""
        return [list({column: None for record in self.take(rows) for column in record})]

    def _csv_places(self, begins: int) -> tuple[np.ndarray, np.ndarray]:
        assert self.header
        with self._stream() as stream:
            stream.seek(begins)
            ends = np.fromiter((end for end, _ in files.csv_rows(stream, self.header[1])), dtype=np.int64)
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        return starts + begins, (ends - starts).astype(np.int32)

    def _json_places(self, begins: int) -> tuple[np.ndarray, np.ndarray]:
        """Lines that are not blank, without their line break."""
        breaks, position = [np.array([begins - 1])], begins
        with self._stream() as stream:
            while block := stream.read(BLOCK):
                breaks.append(np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + position)
                position += len(block)
        ends = np.concatenate([*breaks, [position]])
        starts, sizes = ends[:-1] + 1, np.diff(ends) - 1
        self.starts, self.sizes = starts, sizes
        texts = (line for rows in _blocks(len(starts)) for line in self.lines(rows))
        filled = np.fromiter((bool(line.strip()) for line in texts), dtype=bool, count=len(starts))
        return starts[filled], sizes[filled].astype(np.int32)
