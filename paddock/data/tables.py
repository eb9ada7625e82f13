"""Data files as tables of rows that are parsed one at a time, and stay on disk: memory does not grow with rows."""

from __future__ import annotations

import hashlib
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paddock.config.paths import BUILTIN
from paddock.core.files import whole_file
from paddock.data.builtin import builtin_rows
from paddock.data.kept import file_digest, kept_arrays
from paddock.data.processes import MANY, over_ranges
from paddock.errors import UserError
from paddock.facts import files
from paddock.facts.files import FileSource
from paddock.facts.machine import cache_folder

Record = dict[str, Any]
SMALL = 16 * 2**20
"""Bytes of a file up to which its rows are held in memory, and nothing about it is kept on disk."""
BLOCK = 16 * 2**20
ROWS = 4096


class Table(ABC):
    """The rows of one file."""

    def __init__(self, path: str, columns: list[str], count: int):
        self.path, self.columns, self.count = path, columns, count

    @abstractmethod
    def rows(self, indices: Sequence[int], names: Sequence[str] | None = None) -> list[Record]:
        """Returns rows by their numbers. With `names`, columns that are not among them may be missing."""

    @abstractmethod
    def digest(self) -> bytes:
        """Returns a hash of the content: a file that moved is the same file, one that was rewritten is another."""

    def records(self, names: Sequence[str]) -> Iterator[Record]:
        """Yields all rows in order, with these columns only."""
        for block in _blocks(self.count):
            yield from ({name: record.get(name) for name in names} for record in self.rows(block, names))

    def location(self, row: int) -> str:
        """Returns the row's location as error messages name it: `train.parquet row 12`."""
        return f"{self.path} row {row}"


def _blocks(count: int) -> Iterator[range]:
    return (range(start, min(start + ROWS, count)) for start in range(0, count, ROWS))


def _neighbours(indices: Sequence[int]) -> Iterator[range]:
    """Yields the same numbers as ranges: rows side by side are read at once."""
    if isinstance(indices, range):
        yield indices
        return
    start = end = -1
    for index in indices:
        if index != end:
            if end > start:
                yield range(start, end)
            start = index
        end = index + 1
    if end > start:
        yield range(start, end)


def bad_row(location: str, column: str, reason: str, fix: str) -> UserError:
    return UserError(reason, key=f"{location}, column {column!r}", fix=fix)


def open_tables(path: str, key: str, wanted: Callable[[list[str]], Sequence[str]]) -> list[Table]:
    """Opens a table for each file that the path stands for; `key` is the config key that names it.

    Of a file's columns the `wanted` ones are read, where the format allows to leave others out.
    """
    if path.startswith(BUILTIN):
        return [_builtin(path)]
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
            return lines_of(source)
        columns = files.columns_of(source, key)
        used = set(wanted(columns))
        return ArrowRows(source, columns, [column for column in columns if column in used])


class ArrowRows(Table):
    """Rows of a parquet file or of one that `datasets` wrote.

    A parquet file cannot be read row by row. A large one is written as an Arrow file into the cache, once, and that is
    mapped into memory; so are files of `datasets`.
    """

    def __init__(self, source: FileSource, columns: list[str], read: list[str]):
        """`read` names the columns of the file that are read."""
        self.source, self.read = source, read
        super().__init__(source.path, columns, self.table.num_rows)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "table"}

    @cached_property
    def table(self) -> Any:
        import pyarrow as pa  # rows of text files do without it: 28 MiB
        from pyarrow import parquet

        file = self.source.file
        if self.source.kind == "arrow":
            with pa.memory_map(str(file)) as mapped:
                return pa.ipc.open_stream(mapped).read_all().select(self.read)
        if file.stat().st_size <= SMALL and parquet.read_metadata(file).num_rows < MANY:
            return parquet.read_table(file, columns=self.read)
        name = hashlib.sha256(self._content + "\0".join(self.read).encode()).hexdigest()
        unpacked = cache_folder("rows") / f"{name}.arrow"
        if not unpacked.is_file():
            try:
                self._unpack(unpacked)
            except OSError:  # a cache that cannot be written costs memory, not the run
                return parquet.read_table(file, columns=self.read)
        with pa.memory_map(str(unpacked)) as mapped:
            return pa.ipc.open_file(mapped).read_all()

    def _unpack(self, target: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        with parquet.ParquetFile(self.source.file) as packed, whole_file(target) as stream:
            schema = pa.schema([packed.schema_arrow.field(name) for name in self.read])
            with pa.ipc.new_file(stream, schema) as writer:
                for batch in packed.iter_batches(batch_size=ROWS, columns=self.read):
                    writer.write_batch(batch)

    @cached_property
    def _content(self) -> bytes:
        return file_digest(self.source.file)

    def rows(self, indices: Sequence[int], names: Sequence[str] | None = None) -> list[Record]:
        table = self.table if names is None else self.table.select([name for name in self.read if name in names])
        return [row for part in _neighbours(indices) for row in table.slice(part.start, len(part)).to_pylist()]

    def digest(self) -> bytes:
        return self._content


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


class Lines(Table):
    """Rows of JSON or csv, read by their offsets in a file or in bytes.

    Arrow's own JSON reader is not used: it takes texts for dates, and wants one type in a column.
    """

    def __init__(self, path: str, content: Path | bytes, source: FileSource | None = None):
        super().__init__(path, [], 0)
        self.content = content
        self.header: tuple[list[str], str] | None = None
        """Names and delimiter, of csv."""
        self._file: int | None = None
        self._stamp = self._stat()
        begins = self._read_header(source) if source and source.kind == "csv" else 0
        index = self._index(begins)
        self.starts, self.sizes, self._digest = index["starts"], index["sizes"], index["digest"].tobytes()
        self.columns = self.header[0] if self.header else [str(name) for name in index["columns"]]
        self.count = len(self.starts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def rows(self, indices: Sequence[int], names: Sequence[str] | None = None) -> list[Record]:
        return [self._parse(index, line) for index, line in zip(indices, self._lines(indices), strict=True)]

    def digest(self) -> bytes:
        return self._digest

    def _lines(self, indices: Sequence[int]) -> Iterator[bytes]:
        for part in _neighbours(indices):
            starts, sizes = self.starts[part.start : part.stop], self.sizes[part.start : part.stop]
            begin = int(starts[0]) if part else 0
            block = self._read(begin, int(starts[-1] + sizes[-1]) - begin) if part else b""
            yield from (block[s : s + n] for s, n in zip((starts - begin).tolist(), sizes.tolist(), strict=True))

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
        return io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content.open("rb")

    def _index(self, begins: int) -> dict[str, np.ndarray]:
        """Returns the start and length of each row, and the columns; kept for a large file."""
        if isinstance(self.content, bytes):
            return self._survey(begins)
        self._content = file_digest(self.content)
        decided = b"lines 1" + bytes([self.header is None]) + self._content
        return kept_arrays("rows", decided, lambda: self._survey(begins))

    def _survey(self, begins: int) -> dict[str, np.ndarray]:
        starts, sizes = np.fromiter(self._places(begins), dtype=np.dtype((np.int64, 2))).T
        self.starts, self.sizes = starts, sizes.astype(np.int32)
        digest = hashlib.sha256("\0".join(self.header[0]).encode() + b"\n" if self.header else b"")
        for rows in _blocks(len(starts)):
            digest.update((b"\n" if rows.start else b"") + b"\n".join(self._lines(rows)))
        names = [] if self.header else [name for found in over_ranges(len(starts), self._names_in) for name in found]
        return {
            "starts": self.starts,
            "sizes": self.sizes,
            "digest": np.frombuffer(digest.digest(), np.uint8),
            "columns": np.array(list(dict.fromkeys(names)), dtype=np.str_),
        }

    def _names_in(self, rows: range) -> list[list[str]]:
        """The columns of these rows, as one list: each row is parsed, so that a broken one is named before training."""
        return [list({column: None for record in self.rows(rows) for column in record})]

    def _places(self, begins: int) -> Iterator[tuple[int, int]]:
        """Yields where each row begins, and its bytes: rows of csv, or lines of JSON that are not blank."""
        with self._stream() as stream:
            stream.seek(begins)
            if self.header:
                start = 0
                for end, _ in files.csv_rows(stream, self.header[1]):
                    yield begins + start, end - start
                    start = end
                return
            for line in stream:
                if line.strip():
                    yield begins, len(line.removesuffix(b"\n"))
                begins += len(line)
