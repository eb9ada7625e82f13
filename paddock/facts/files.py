"""Files of rows as people have them: which files a path stands for, how they are written, how many rows they have.

Nothing here imports more than the standard library before a parquet or Arrow file is met: a plan answers at once.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from paddock.errors import UserError
from paddock.facts.datasets import known_dataset
from paddock.facts.models import BUILTIN

TEXTS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
SUFFIXES = (".parquet", *TEXTS)
ENDINGS = (*SUFFIXES, *(f"{suffix}.gz" for suffix in TEXTS))
HELD_OUT = ("test", "validation", "valid", "val", "dev")
SPLIT = re.compile(rf"(train|{'|'.join(HELD_OUT)})(?=$|[-_./])")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")
SAMPLED = 1000  # rows
PROMPT = "prompt"
CONVERSATIONS = ("messages", "conversations")
"""Columns of whole conversations: a last message of the assistant's is the answer. In any other column it is the
beginning of the answer, which the policy goes on with."""
QUESTIONS = (PROMPT, "question", "problem", "instruction", *CONVERSATIONS)
ANSWERS = ("answer", "solution", "ground_truth", "label", "output")
"""Names of columns, the first that a file has is taken."""
TRUTH = "reward_model"
"""Column of the truths, in rows that have all that scorers are called with under verl's names."""
LIST = '[{"prompt": "...", "answer": "..."}, ...], or one such object on each line of a .jsonl file'
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "observation": "tool"}
Record = dict[str, Any]

csv.field_size_limit(min(sys.maxsize, 2**31 - 1))


@dataclass(frozen=True)
class FileSource:
    """One file of rows."""

    path: str
    """The path as messages name it."""
    file: Path
    kind: str
    """parquet, arrow, jsonl, json or csv."""
    zipped: bool = False
    tabs: bool = False
    """A csv file whose values are separated by tabs."""


def hub_name(path: str) -> bool:
    """True for `org/name` or `org/name:config`, unless that is a path on this disk or the file of a folder on it."""
    plain = os.path.expanduser(path)
    if not HUB_NAME.fullmatch(path) or os.path.exists(plain) or path.endswith(ENDINGS):
        return False
    return not os.path.isdir(os.path.dirname(plain))


@dataclass(frozen=True)
class FileSample:
    """How many rows there are, and how long prompts and answers are among the first of them, in bytes."""

    count: int | None
    """None if the rows are not on this disk yet."""
    prompts: tuple[int, int]
    """The shortest and the longest; (0, 0) if that is not known."""
    answer: int
    """The longest; 0 if no row has an answer."""


def sample(paths: list[str], key: str, prompt: str | None = None, answer: str | None = None) -> FileSample:
    """Looks at the first rows of each file, at the named columns or those that are found by themselves.

    Rows of the hub, which are not here yet, are not counted.
    """
    questions, known = [prompt] if prompt else QUESTIONS, [answer] if answer else ANSWERS
    if any(hub_name(path) for path in paths):
        return FileSample(None, (0, 0), 0)
    prompts, answers, count = [], [0], 0
    for path in paths:
        count += count_rows(path, key=key)
        for source in sources(path, key):
            with readable(source, key):
                for record in itertools.islice(records(source), SAMPLED):
                    prompts.append(_bytes(next((record[name] for name in questions if record.get(name)), "")))
                    truth = record.get(TRUTH)
                    truths = [truth.get("ground_truth")] if isinstance(truth, dict) else map(record.get, known)
                    answers.append(_bytes(next((text for text in truths if text is not None), "")))
    return FileSample(count, (min(prompts, default=0), max(prompts, default=0)), max(answers))


def prompt_column(columns: Sequence[str], named: str) -> str | None:
    """Returns the column of prompts: the one that `data.prompt_key` names, or if that is unset the first known name."""
    if named in columns:
        return named
    return next((name for name in QUESTIONS if name in columns), None) if named == PROMPT else None


def without_prompts(path: str, columns: Sequence[str], named: str, key: str) -> UserError:
    have = ", ".join(map(repr, columns)) or "none"
    fix = "name the column of the prompts: data.prompt_key=..."
    return UserError(f"{path} has no column {named!r}; it has {have}", key=key, fix=fix)


def as_messages(value: Any) -> Any:
    """Returns turns of `from` and `value`, as ShareGPT has them, as messages of role and content; all else as it is."""
    if not isinstance(value, list) or not all(isinstance(turn, dict) and "from" in turn for turn in value):
        return value
    return [{"role": SPEAKERS.get(turn["from"], turn["from"]), "content": _said(turn)} for turn in value]


def _said(turn: Record) -> Any:
    """Returns what a turn says; an answer may stand under `ground_truth`."""
    truth = turn.get("ground_truth")
    return truth.get("value") if turn.get("value") is None and isinstance(truth, dict) else turn.get("value")


def _bytes(value: Any) -> int:
    """Returns the length of a text, or of the texts of messages."""
    if isinstance(value, list):
        return sum(_bytes(turn.get("content")) for turn in as_messages(value) if isinstance(turn, dict))
    return 0 if value is None else len(str(value).encode(errors="replace"))


def is_here(path: str) -> bool:
    """True if rows can be read from this path: a file or a folder of this disk, or built in."""
    return path.startswith(BUILTIN) or os.path.exists(os.path.expanduser(path))


def sources(path: str | Path, key: str | None = None) -> list[FileSource]:
    """Returns the files that a path stands for: itself; of a folder its data files, or what `datasets` saved there.

    Where a folder names splits, `key` decides: data.val_files takes the held-out one, any other key the training one.
    """
    name, file = key or "file", Path(os.path.expanduser(path))
    if os.path.isdir(file):
        return _in_folder(str(path), file, name)
    if not os.path.isfile(file):
        raise UserError("the file does not exist", key=name, value=path, fix=_remedy(path, "correct the path"))
    found = _source(str(path), file)
    if found is None:
        reason = f"not a data file: the name must end in {', '.join(SUFFIXES)}, or {TEXTS[0]}.gz and the like"
        raise UserError(reason, key=name, value=path, fix="convert it, or correct the path")
    return [found]


def count_rows(path: str | Path, *, key: str | None = None) -> int:
    """`key` is the config key that names the path; an error repeats it."""
    return sum(_count(source, key) for source in sources(path, key))


def columns_of(source: FileSource, key: str | None = None) -> list[str]:
    """Returns column names in file order; of a JSON file, those of its first record."""
    with readable(source, key):
        if source.kind == "parquet":
            return list(_metadata(source.file).schema.to_arrow_schema().names)
        if source.kind == "arrow":
            with arrow_stream(source.file) as stream:
                return list(stream.schema.names)
        if source.kind == "csv":
            with opened(source) as lines:
                return csv_header(lines, source)[0]
        return list(next(records(source), {}))


def records(source: FileSource) -> Iterator[Record]:
    """Rows from the first on, one at a time."""
    if source.kind in ("parquet", "arrow"):
        yield from _arrow_records(source)
    elif source.kind == "json":
        yield from json_list(source)
    elif source.kind == "csv":
        with opened(source) as lines:
            names, delimiter = csv_header(lines, source)
            for number, (_, values) in enumerate(csv_rows(lines, delimiter)):
                yield csv_record(names, values, f"{source.path} row {number}")
    else:
        with opened(source) as lines:
            for number, line in enumerate(line for line in lines if line.strip()):
                yield json_row(line, f"{source.path} row {number}")


def json_row(line: bytes, location: str) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}", key=location, fix="mend or remove it") from error
    record = _record(record)
    if not isinstance(record, dict):
        raise UserError(f"a row must be a JSON object, not {record!r:.80}", key=location, fix="mend or remove it")
    return record


def json_list(source: FileSource) -> list[Record]:
    with opened(source) as file:
        found = json.loads(file.read().decode("utf-8-sig"))
    if not isinstance(found, list):
        raise NoRows(f"it holds no list, but {found!r:.60}")
    rows = [_record(row) for row in found]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise NoRows(f"row {number} is no object: {row!r:.60}")
    return rows


class NoRows(ValueError):
    """Is raised for JSON that is no list of rows."""

    fix = LIST


def _record(row: Any) -> Any:
    """Returns a row that is a list of turns as a row with a column of conversations."""
    turns = isinstance(row, list) and row and all(isinstance(turn, dict) for turn in row)
    return {CONVERSATIONS[-1]: row} if turns else row


@contextmanager
def opened(source: FileSource) -> Iterator[BinaryIO]:
    """The bytes of a text file, unpacked."""
    with cast(BinaryIO, gzip.open(source.file)) if source.zipped else source.file.open("rb") as file:
        yield file


def csv_header(lines: BinaryIO, source: FileSource) -> tuple[list[str], str]:
    """Returns the names of the columns, and what separates them; `lines` then stands at the first row."""
    first = lines.readline()
    while first.strip() == b"" and first:
        first = lines.readline()
    text = first.removeprefix(b"\xef\xbb\xbf").decode()
    delimiter = "\t" if source.tabs else max((",", ";", "\t"), key=text.count)
    names = next(csv.reader([text], delimiter=delimiter), [])
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"the header names the column {twice!r} twice")
    return names, delimiter


def csv_rows(lines: Iterable[bytes], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Each row's values with the number of bytes read so far: a row may have line breaks within quotes."""
    read = 0

    def texts() -> Iterator[str]:
        nonlocal read
        for line in lines:
            read += len(line)
            yield line.decode()

    for values in csv.reader(texts(), delimiter=delimiter, strict=True):
        if values:
            yield read, values


def csv_record(names: list[str], values: list[str], location: str) -> Record:
    if len(values) != len(names):
        reason = f"has {len(values)} values, and the header names {len(names)} columns"
        raise UserError(reason, key=location, fix='put a text with commas or line breaks in quotes: "a, b"')
    return dict(zip(names, values, strict=True))


def one_csv_row(text: str, delimiter: str) -> list[str]:
    found = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    return next((values for values in found if values), [])


@contextmanager
def arrow_stream(file: Path) -> Iterator[Any]:
    """The record batches of a file that `datasets` wrote, mapped into memory."""
    import pyarrow as pa

    with pa.memory_map(str(file)) as mapped:
        yield pa.ipc.open_stream(mapped)


@contextmanager
def readable(source: FileSource, key: str | None) -> Iterator[None]:
    """Turns what the libraries of the formats raise into an error about the file."""
    try:
        yield
    except UserError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error) as error:  # pyarrow's are such
        reason = f"the file cannot be read: {next(iter(str(error).splitlines()), type(error).__name__)}"
        fix = "write the file again"
        if isinstance(error, UnicodeDecodeError):
            name = source.file.name
            fix = f"save it as UTF-8, e.g. iconv -f latin1 -t utf8 {name} > utf8-{name}"
        fix = _remedy(source.path, getattr(error, "fix", fix))
        raise UserError(reason, key=key or "file", value=source.path, fix=fix) from error


def _count(source: FileSource, key: str | None) -> int:
    with readable(source, key):
        if source.kind == "parquet":
            return int(_metadata(source.file).num_rows)
        if source.kind == "arrow":
            with arrow_stream(source.file) as stream:
                return sum(batch.num_rows for batch in stream)
        if source.kind == "jsonl":
            with opened(source) as lines:
                return sum(1 for line in lines if line.decode().strip())
        return sum(1 for _ in records(source))


def _arrow_records(source: FileSource) -> Iterator[Record]:
    if source.kind == "arrow":
        with arrow_stream(source.file) as stream:
            for batch in stream:
                yield from batch.to_pylist()
        return
    from pyarrow import parquet

    with parquet.ParquetFile(source.file) as file:
        for batch in file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def _metadata(file: Path) -> Any:
    from pyarrow import parquet

    return parquet.read_metadata(file)


def _source(path: str, file: Path) -> FileSource | None:
    zipped = file.name.endswith(".gz")
    suffix = Path(file.stem).suffix if zipped else file.suffix
    if suffix not in SUFFIXES or (zipped and suffix not in TEXTS):
        return None
    kinds = {".ndjson": "jsonl", ".tsv": "csv"}
    return FileSource(path, file, kinds.get(suffix, suffix[1:]), zipped, suffix == ".tsv")


def _in_folder(path: str, folder: Path, key: str) -> list[FileSource]:
    if (folder / "dataset_dict.json").is_file():
        with _written_by_datasets(path, "dataset_dict.json", key):
            saved = list(json.loads((folder / "dataset_dict.json").read_text())["splits"])
        split = _split(saved, path, key)
        return _saved(f"{path}/{split}", folder / split, key)
    if (folder / "state.json").is_file():
        return _saved(path, folder, key)
    files = _data_files(folder) or [file for name in _names(folder) if name == "data" or SPLIT.fullmatch(name)
                                    for file in _data_files(folder / name)]  # fmt: skip
    if not files:
        reason = f"the folder holds no data files ({', '.join(SUFFIXES)})"
        raise UserError(reason, key=key, value=path, fix="name a folder that has some, or a file")
    named = {file: SPLIT.match(file.relative_to(folder).as_posix()) or SPLIT.match(file.name) for file in files}
    if any(named.values()):
        chosen = _split([match[1] for match in named.values() if match], path, key)
        files = [file for file in files if (match := named[file]) and match[1] == chosen]
    return [cast(FileSource, _source(f"{path.rstrip('/')}/{file.relative_to(folder)}", file)) for file in files]


def held_out_split(path: str) -> bool:
    """True if this is a folder with rows to validate with beside those to train on."""
    if not os.path.isdir(os.path.expanduser(path)):
        return False
    try:
        train, held_out = sources(path, "data.train_files"), sources(path, "data.val_files")
    except UserError:
        return False
    return bool(held_out) and train != held_out


def _split(splits: Sequence[str], path: str, key: str) -> str:
    """Returns the split that this key asks for. A folder with one split has just that one to give."""
    wanted = HELD_OUT if key == "data.val_files" else ("train",)
    names = sorted(set(splits))
    if split := next((name for name in wanted if name in names), None):
        return split
    if len(names) == 1:
        return names[0]
    reason = f"holds the splits {', '.join(names) or '(none)'}, and none is called {wanted[0]}"
    raise UserError(reason, key=key, value=path, fix="name the folder or the files of a split")


def _saved(path: str, folder: Path, key: str) -> list[FileSource]:
    """Lists the files that `datasets.Dataset.save_to_disk` wrote: state.json lists its Arrow files."""
    with _written_by_datasets(path, "state.json", key):
        listed = json.loads((folder / "state.json").read_text())["_data_files"]
        return [FileSource(f"{path}/{entry['filename']}", folder / entry["filename"], "arrow") for entry in listed]


@contextmanager
def _written_by_datasets(path: str, file: str, key: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{file} cannot be read, which `save_to_disk` writes: {error}"
        raise UserError(reason, key=key, value=path, fix="save the data set again") from error


def _data_files(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder) if os.path.isfile(folder / name) and _source("", folder / name)]


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in sorted(os.listdir(folder)) if not name.startswith((".", "_"))]
    except OSError:  # it is no folder, or may not be read
        return []


def _remedy(path: str | Path, otherwise: str) -> str:
    known = known_dataset(path)
    return known.prepare_command if known and known.prepare_command else otherwise
