"""Files that are either the old ones or the complete new ones."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from paddock.data.prepare.preparer import Row
from paddock.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa


def write_splits(target: Path, rows: Mapping[str, list[Row]], schema: pa.Schema, examples: bool = False) -> None:
    """Writes a file for each split; with `examples`, its first row also as JSON."""
    for split, found in rows.items():
        write_parquet(target / f"{split}.parquet", found, schema)
        if examples:
            write_json(target / f"{split}_example.json", found[0])


def summary(rows: Mapping[str, list[Row]], target: Path, next_command: str, last: str = "") -> str:
    """Returns what was written, and what to type next: `next_command`, the files, and what comes `last`."""
    counts = " and ".join(f"{len(found):,} {split}" for split, found in rows.items())
    keys = {"train": "data.train_files", "test": "data.val_files"}
    overrides = " ".join(shlex.quote(f"{keys[split]}={target / f'{split}.parquet'}") for split in rows)
    return f"Wrote {counts} rows to {target}. Next: paddock {next_command} {overrides}{last and f' {last}'}"


def write_parquet(path: Path, rows: list[Row], schema: pa.Schema) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.Table.from_pylist(rows, schema=schema)
    with _replacing(path) as file:
        parquet.write_table(table, file)


def write_json(path: Path, row: Row) -> None:
    with _replacing(path) as file:
        file.write(json.dumps(row, indent=2, ensure_ascii=False).encode() + b"\n")


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name `path` once it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise UserError(reason, key=str(path), fix="give another folder: --local_save_dir PATH") from error
    finally:
        with suppress(OSError):  # where the folder cannot be made, that error is the one to report
            temporary.unlink(missing_ok=True)
