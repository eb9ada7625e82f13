"""The command behind `paddock data NAME` and the scripts in examples/data_preprocess."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from paddock.data.prepare import gsm8k, math
from paddock.data.prepare.preparer import Preparer, Row
from paddock.data.prepare.records import FLAG, SPLITS, Splits, from_hub, from_path, split_files
from paddock.data.prepare.write import write_json, write_parquet
from paddock.errors import EXIT_CODE, UserError

PREPARERS = {preparer.name: preparer for preparer in (gsm8k.PREPARER, math.PREPARER)}
NAMES = tuple(PREPARERS)


def main(name: str, argv: Sequence[str]) -> int:
    """Prepare the data set `name` and return the exit code. argparse answers --help and a wrong flag itself."""
    try:
        preparer = _preparer(name)
        options = _parser(preparer).parse_args(argv)
        source, target = _source(options), _target(options, preparer)
        _check_apart(source, target)
        raw = from_path(source, preparer.config) if source else from_hub(preparer.hub, preparer.config)
        rows = _rows(preparer, raw)
        _write(preparer, rows, target)
        print(_summary(rows, target))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0


def _preparer(name: str) -> Preparer:
    if name in PREPARERS:
        return PREPARERS[name]
    close = get_close_matches(name, NAMES, n=1)
    fix = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(NAMES)}"
    raise UserError("no such data set to prepare", key="paddock data", value=name, fix=fix)


def _parser(preparer: Preparer) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"paddock data {preparer.name}",
        description=f"Write {preparer.title} ({preparer.hub}) as train.parquet and test.parquet, ready for training.",
        allow_abbrev=False,
    )
    parser.add_argument("--local_save_dir", metavar="DIR", help=f"folder to write to (default: {preparer.folder})")
    parser.add_argument(FLAG, metavar="DIR", help="folder with a local copy of the raw data (default: ask the hub)")
    parser.add_argument("--local_dir", metavar="DIR", help="deprecated: the old name of --local_save_dir")
    parser.add_argument("--hdfs_dir", metavar="URL", help="refused: files are written to local folders only")
    return parser


def _source(options: argparse.Namespace) -> Path | None:
    return None if options.local_dataset_path is None else _folder(FLAG, options.local_dataset_path)


def _target(options: argparse.Namespace, preparer: Preparer) -> Path:
    if options.hdfs_dir is not None:
        fix = f"drop --hdfs_dir, then copy the folder: hdfs dfs -put -f DIR {shlex.quote(options.hdfs_dir)}"
        raise UserError("only local folders can be written", key="--hdfs_dir", value=options.hdfs_dir, fix=fix)
    if options.local_dir is None:
        new = preparer.folder if options.local_save_dir is None else options.local_save_dir
        return _folder("--local_save_dir", new)
    old = _folder("--local_dir", options.local_dir)
    if options.local_save_dir is not None and _folder("--local_save_dir", options.local_save_dir) != old:
        reason = f"is the old name of --local_save_dir, which says {options.local_save_dir}"
        raise UserError(reason, key="--local_dir", value=options.local_dir, fix="keep --local_save_dir alone")
    print("--local_dir is deprecated and still works; write --local_save_dir instead", file=sys.stderr)
    return old


def _folder(flag: str, value: str) -> Path:
    if not value.strip():
        raise UserError("is empty; is a shell variable unset?", key=flag, value="''", fix=f"{flag} PATH")
    if "://" in value:
        raise UserError("is not a local folder", key=flag, value=value, fix="copy the data to or from a local folder")
    return Path(os.path.abspath(os.path.expanduser(value)))


def _check_apart(source: Path | None, target: Path) -> None:
    """Raw files named like ours, train.parquet, must not be overwritten by their own preparation."""
    if source == target and source.is_dir() and not split_files(source):
        raise UserError(
            "is also the folder to write to, where the raw files would be overwritten",
            key=FLAG,
            value=source,
            fix="give another --local_save_dir",
        )


def _rows(preparer: Preparer, raw: Splits) -> dict[str, list[Row]]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    rows: dict[str, list[Row]] = {}
    for split in SPLITS:
        if not raw[split]:
            raise UserError(f"the {split} split of {preparer.title} has no records", fix="check the raw data")
        records = track(
            raw[split], f"{preparer.title} {split}", console=console, transient=True, disable=not console.is_terminal
        )
        rows[split] = [preparer.row(record, split, index) for index, record in enumerate(records)]
    return rows


def _write(preparer: Preparer, rows: dict[str, list[Row]], target: Path) -> None:
    for split in SPLITS:
        write_parquet(target / f"{split}.parquet", rows[split], preparer.schema())
        if preparer.examples:
            write_json(target / f"{split}_example.json", rows[split][0])


def _summary(rows: dict[str, list[Row]], target: Path) -> str:
    counts = " and ".join(f"{len(rows[split]):,} {split}" for split in SPLITS)
    files = {"data.train_files": target / "train.parquet", "data.val_files": target / "test.parquet"}
    overrides = " ".join(shlex.quote(f"{key}={path}") for key, path in files.items())
    return f"Wrote {counts} rows to {target}. Next: paddock plan algorithm.adv_estimator=rloo {overrides}"
