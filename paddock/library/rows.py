"""Rows that a program has in memory become files, by their content: what reads data reads these as well.

A list of dicts, a `datasets.Dataset`, a pandas or an arrow table. The file is in the cache folder, so that the same
rows are the same file when a run goes on; names of files and of data sets of the hub stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paddock.errors import UserError
from paddock.facts.files import ENDINGS, hub_name, is_here
from paddock.facts.machine import cache_folder

SHAPES = "a list of dicts, a datasets.Dataset, a pandas or arrow table, a path, or a name of the hub"


def files_of_rows(data: Any, name: str) -> list[str]:
    """Returns the files that hold these rows; `name` is the argument that gave them."""
    if isinstance(data, str | os.PathLike):
        return [os.fspath(data)]
    if isinstance(data, Sequence) and data and all(isinstance(item, str | os.PathLike) for item in data):
        paths = [os.fspath(item) for item in data]
        if text := next(
            (path for path in paths if not (is_here(path) or hub_name(path) or path.endswith(ENDINGS))), None
        ):
            fix = 'rows are dicts: [{"prompt": "1+1=", "answer": "2"}, ...]; or the paths of data files'
            raise UserError("is no data file that is here; a list of texts is no list of rows", key=name,
                            value=f"{text!r:.80}", fix=fix)  # fmt: skip
        return paths
    if isinstance(data, Sequence):
        return [str(written(f"{name}.jsonl", lines_of(data, name)))]
    table = arrow_table(data, name)
    if table is not None:
        return [str(written(f"{name}.parquet", parquet_of(table)))]
    raise UserError(f"is {described(data)}", key=name, value=f"{data!r:.80}", fix=SHAPES)


def rows_of_texts(rows: Any) -> Any:
    """Returns texts that are no files as rows of prompts; anything else as it is."""
    texts = isinstance(rows, Sequence) and not isinstance(rows, str) and all(isinstance(row, str) for row in rows)
    return [{"prompt": row} for row in rows] if texts and not all(map(os.path.exists, rows)) else rows


def lines_of(rows: Sequence[Any], name: str) -> bytes:
    """Returns rows as JSON lines. A value that JSON does not have is refused: it would come back as another."""
    if not rows:
        raise UserError("holds no rows", key=name, value="[]", fix=SHAPES)
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            fix = 'a row is a dict: {"prompt": "...", "answer": "..."}'
            raise UserError(f"row {number} is {described(row)}", key=name, value=f"{row!r:.80}", fix=fix)
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, default=plain).encode())
        except (TypeError, ValueError) as error:
            fix = "numbers, texts, lists and dicts; or a datasets.Dataset, which has further types"
            raise UserError(f"row {number}: {error}", key=name, fix=fix) from None
    return b"\n".join(lines) + b"\n"


def plain(value: Any) -> Any:
    """Returns the number or the list in a NumPy value."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is not JSON")


def arrow_table(data: Any, name: str) -> Any:
    """Returns an arrow table of the rows; None for an object that is no table."""
    if type(data).__module__.partition(".")[0] == "datasets":
        if not hasattr(data, "with_format") or not hasattr(data, "num_rows") or isinstance(data.num_rows, dict):
            return None
        return data.with_format("arrow")[:]
    if type(data).__module__.partition(".")[0] == "pandas":
        import pyarrow as pa

        if not hasattr(data, "columns"):  # a Series
            return None
        try:
            return pa.Table.from_pandas(data, preserve_index=False)
        except (ValueError, TypeError) as error:  # of arrow, too: ArrowInvalid, ArrowTypeError
            fix = 'one type for each column, each name once: table["answer"] = table["answer"].astype(str)'
            raise UserError(f"the table cannot be read: {error}", key=name, fix=fix) from None
    if hasattr(data, "to_arrow"):  # polars
        return data.to_arrow()
    return data if hasattr(data, "schema") and hasattr(data, "num_rows") else None


def parquet_of(table: Any) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    file = pa.BufferOutputStream()
    parquet.write_table(table, file)
    return file.getvalue().to_pybytes()


def written(name: str, content: bytes) -> Path:
    """Returns the file with this name and content, which is written unless it is there."""
    path = cache_folder("given") / hashlib.sha256(content).hexdigest()[:16] / name
    if path.is_file() and path.stat().st_size == len(content):
        return path
    from paddock.core.files import replacing

    with replacing(path, "data") as file:
        file.write(content)
    return path


def described(value: Any) -> str:
    kind = type(value)
    return "None" if value is None else f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind}"
