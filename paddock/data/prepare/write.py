"""Parquet and JSON files of prepared rows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.core.files import replacing
from paddock.data.prepare.preparer import Columns, Row

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "--local_save_dir"


def write_splits(target: Path, rows: Mapping[str, list[Row]], columns: Columns, examples: bool = False) -> None:
    """Writes a file for each split; with `examples`, its first row also as JSON."""
    import pyarrow as pa
    from pyarrow import parquet

    for split, prepared in rows.items():
        table = pa.Table.from_pylist(prepared, schema=arrow_schema(columns))
        with replacing(target / f"{split}.parquet", FOLDER) as file:
            parquet.write_table(table, file)
        if examples:
            with replacing(target / f"{split}_example.json", FOLDER) as file:
                file.write(json.dumps(prepared[0], indent=2, ensure_ascii=False).encode() + b"\n")


def summary(rows: Mapping[str, list[Row]], target: Path, next_command: str, last: str = "") -> str:
    """Returns what was written, and what to type next: `next_command`, the files, and what comes `last`."""
    counts = " and ".join(f"{len(found):,} {split}" for split, found in rows.items())
    keys = {"train": "data.train_files", "test": "data.val_files"}
    overrides = " ".join(shlex.quote(f"{keys[split]}={target / f'{split}.parquet'}") for split in rows)
    return f"Wrote {counts} rows to {target}. Next: paddock {next_command} {overrides}{last and f' {last}'}"


def arrow_schema(columns: Columns) -> pa.Schema:
    import pyarrow as pa

    def typed(kind: Any) -> pa.DataType:
        if isinstance(kind, str):
            return pa.type_for_alias(kind)
        if isinstance(kind, list):
            return pa.list_(typed(kind[0]))
        return pa.struct([(name, typed(part)) for name, part in kind.items()])

    return pa.schema([(name, typed(kind)) for name, kind in columns.items()])
