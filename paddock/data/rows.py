"""How many rows a data file has and which columns, without reading more of it than that takes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddock.errors import UserError
from paddock.facts.datasets import known_dataset

SUFFIXES = (".parquet", ".json", ".jsonl")


def count_rows(path: str | Path, *, key: str | None = None) -> int:
    """`key` is the config key that names the file; an error repeats it."""
    with _data_file(path, key) as file:
        if file.suffix == ".parquet":
            return int(_metadata(file).num_rows)
        if file.suffix == ".json":
            return len(_records(file))
        with file.open(encoding="utf-8") as lines:
            return sum(1 for line in lines if line.strip())


def columns(path: str | Path, *, key: str | None = None) -> list[str]:
    """Column names in file order; of a JSON file, those of its first record."""
    with _data_file(path, key) as file:
        if file.suffix == ".parquet":
            return list(_metadata(file).schema.to_arrow_schema().names)
        if file.suffix == ".json":
            records = iter(_records(file))
            return list(next(records, {}))
        with file.open(encoding="utf-8") as lines:
            return list(json.loads(next((line for line in lines if line.strip()), "{}")))


@contextmanager
def _data_file(path: str | Path, key: str | None) -> Iterator[Path]:
    file = Path(os.path.expanduser(path))
    name = key or "file"
    if not file.is_file():
        reason = "is a folder, not a file" if file.is_dir() else "the file does not exist"
        raise UserError(reason, key=name, value=path, fix=_remedy(path, "correct the path"))
    if file.suffix not in SUFFIXES:
        reason = f"not a data file: the name must end in {', '.join(SUFFIXES)}"
        raise UserError(reason, key=name, value=path, fix="convert it, or correct the path")
    try:
        yield file
    except (OSError, ValueError, RecursionError) as error:  # pyarrow and json raise kinds of these
        reason = f"the file cannot be read: {next(iter(str(error).splitlines()), type(error).__name__)}"
        raise UserError(reason, key=name, value=path, fix=_remedy(path, "write the file again")) from error


def _metadata(file: Path) -> Any:
    from pyarrow import parquet

    return parquet.read_metadata(file)


def _records(file: Path) -> list[dict[str, Any]]:
    records = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError("it must hold a JSON list of records")
    return records


def _remedy(path: str | Path, otherwise: str) -> str:
    known = known_dataset(path)
    return known.prepare_command if known and known.prepare_command else otherwise
