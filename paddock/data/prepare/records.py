"""Raw records of a public data set: from the hub, from a local copy, from plain JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddock.data.hub import first_line, load_from_hub
from paddock.errors import UserError
from paddock.facts import files

FLAG = "--local_dataset_path"
SPLITS = ("train", "test")
SUFFIXES = (".jsonl", ".jsonl.gz", ".json")
LAYOUTS = (
    "give a folder that holds train and test as .jsonl, .jsonl.gz or .json files, a folder written by datasets' "
    "save_to_disk, a clone of the hub's repository, or train/<subject>/*.json and test/<subject>/*.json"
)


@dataclass(frozen=True)
class Record:
    """One raw record, and the location an error message names: `data/train.jsonl row 12`."""

    values: Mapping[str, Any]
    location: str

    def text(self, column: str) -> str:
        value = self.values.get(column)
        if isinstance(value, str) and value.strip():
            return value
        if value is None:
            found = "is missing; the record has " + (", ".join(map(repr, self.values)) or "no columns")
        else:
            found = f"must be a text, not {value!r:.80}"
        raise self.error(column, found, f"check that this is the raw data set, and give every record a text {column!r}")

    def error(self, column: str, reason: str, fix: str) -> UserError:
        return UserError(reason, key=f"{self.location}, column {column!r}", fix=fix)


Splits = dict[str, list[Record]]


def from_path(folder: Path, config: str | None, splits: Sequence[str] = SPLITS) -> Splits:
    """The records of a local copy, in any of the layouts the data set is handed around in."""
    if not folder.is_dir():
        reason = "is a file, not a folder" if folder.exists() else "there is no such folder"
        raise UserError(reason, key=FLAG, value=folder, fix=LAYOUTS)
    if plain := split_files(folder):
        return {split: read_file(file, FLAG) for split, file in plain.items()}
    if any((folder / "train").glob("*/*.json")):
        found = {split: list((folder / split).glob("*/*.json")) for split in SPLITS}
        for single in found.values():  # subject by subject, 2.json before 10.json
            single.sort(key=lambda file: (file.parent.name, len(file.stem), file.stem))
        return {split: [_read_single(file) for file in single] for split, single in found.items()}
    return _load_folder(folder, config, splits)


def split_files(folder: Path) -> dict[str, Path]:
    """Returns the folder's train.jsonl and test.jsonl (or .jsonl.gz, .json) by split; empty where it holds neither."""
    candidates = {split: [folder / f"{split}{suffix}" for suffix in SUFFIXES] for split in SPLITS}
    first = {split: next((file for file in named if file.is_file()), None) for split, named in candidates.items()}
    there = {split: file for split, file in first.items() if file}
    if there and len(there) < len(SPLITS):
        have, missing = (next(iter(there.values())).name, next(split for split in SPLITS if split not in there))
        raise UserError(f"holds {have} but no {missing} file", key=FLAG, value=folder, fix=f"add {missing}.jsonl to it")
    return there


def from_hub(name: str, config: str | None, splits: Sequence[str] = SPLITS) -> Splits:
    """Returns the records as the hub publishes them; with HF_HUB_OFFLINE=1, from the cache."""
    try:
        loaded = load_from_hub(name, config)
    except Exception as error:  # the hub's client raises its own, its HTTP library's and the system's errors
        fix = f"get a copy on a machine that can, and pass its folder: {FLAG} PATH (HF_HUB_OFFLINE=1 uses the cache)"
        raise UserError(f"cannot fetch {name} from the hub: {first_line(error)}", fix=fix) from error
    return _named(loaded, name, splits)


def _load_folder(folder: Path, config: str | None, splits: Sequence[str]) -> Splits:
    import datasets

    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
        else:
            known = datasets.get_dataset_config_names(str(folder))
            loaded = datasets.load_dataset(str(folder), config if config in known else None)
    except Exception as error:  # each file format behind `datasets` raises errors of its own
        reason = f"holds nothing that can be read as a data set: {first_line(error)}"
        raise UserError(reason, key=FLAG, value=folder, fix=LAYOUTS) from error
    return _named(loaded, str(folder), splits)


def _named(loaded: Any, origin: str, wanted: Sequence[str]) -> Splits:
    splits = set(loaded) if isinstance(loaded, dict) else set()
    if missing := [split for split in wanted if split not in splits]:
        have = f"the splits {', '.join(sorted(splits))}" if splits else "a single table without splits"
        raise UserError(f"{origin} holds {have}; {' and '.join(missing)} missing", fix=LAYOUTS)
    return {
        split: [Record(values, f"{origin} {split} row {row}") for row, values in enumerate(_stored(loaded[split]))]
        for split in wanted
    }


def _stored(table: Any) -> Iterator[dict[str, Any]]:
    """Rows as they lie in the files: a picture stays the bytes it was published as."""
    for batch in table.with_format("arrow").iter(batch_size=1000):
        yield from batch.to_pylist()


def read_file(path: Path, key: str) -> list[Record]:
    """Reads the records of a JSON file, as a run reads its rows; `key` is the flag that names the path."""
    found = list[Record]()
    for source in files.sources(path, key):
        with files.readable(source, key):
            rows = enumerate(files.records(source))
            found += [_record(values, f"{source.path} row {number}") for number, values in rows]
    return found


def _read_single(path: Path) -> Record:
    """Reads a file that is one JSON object."""
    with files.readable(files.FileSource(str(path), path, "json"), FLAG):
        return _record(files.json_row(path.read_bytes(), str(path)), str(path))


def _record(values: Mapping[str, Any], location: str) -> Record:
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair, which no parquet file takes
        raise UserError(f"a text is no Unicode: {error}", key=location, fix="mend or remove it") from error
    return Record(values, location)
