"""The command behind `paddock data NAME` and the scripts in examples/data_preprocess."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from paddock.core.options import Options
from paddock.core.registry import suggest
from paddock.data.prepare import from_jsonl, geometry3k, gsm8k, gsm8k_sft, gsm8k_tools, hh_rlhf, humaneval, math, mbpp
from paddock.data.prepare.preparer import Preparer, Row, with_origin
from paddock.data.prepare.records import FLAG, SUFFIXES, Splits, from_hub, from_path, read_file, split_files
from paddock.data.prepare.write import summary, write_splits
from paddock.errors import EXIT_CODE, UserError

MODULES = (gsm8k, math, humaneval, mbpp, geometry3k, hh_rlhf)
SINGLE = tuple(module.PREPARER for module in MODULES)
PREPARERS = {one.name: one for one in (*SINGLE, *gsm8k_tools.PREPARERS, *gsm8k_sft.PREPARERS)}
ALIASES = {"geometry3k": "geo3k", "hh_rlhf": "full_hh_rlhf"}
NAMES = (*PREPARERS, from_jsonl.NAME)


def run(arguments: list[str]) -> int:
    if not arguments:
        raise UserError("which data set?", key="paddock data", fix="paddock data gsm8k, or paddock data math")
    return main(arguments[0], arguments[1:])


def main(name: str, argv: Sequence[str]) -> int:
    """Prepare the data set `name` and return the exit code. argparse answers --help itself."""
    try:
        if name == from_jsonl.NAME:
            return from_jsonl.run(argv)
        preparer = _preparer(name)
        options = _parser(preparer).parse_args(argv)
        local = options.local_dataset_path
        source, target = None if local is None else _folder(FLAG, local), _target(options, preparer)
        if preparer.kinds:
            preparer, kind = preparer.kinds[options.split], options.split
            target = target if target.name == kind else target / kind
        _check_apart(source, target)
        raw = _raw(preparer, source)
        rows = _rows(preparer, raw)
        write_splits(target, rows, preparer.columns, preparer.examples)
        left_out = sum(len(raw[split]) - len(rows[split]) for split in preparer.splits)
        more = f" {left_out:,} records say nothing for this use and were left out." if left_out else ""
        print(summary(rows, target, preparer.next_command) + more)
    except UserError as error:
        print(f"paddock: {error}", file=sys.stderr)
        return EXIT_CODE
    return 0


def _raw(preparer: Preparer, source: Path | None) -> Splits:
    if source is None:
        return from_hub(preparer.hub, preparer.config, preparer.splits)
    files = [source / f"{preparer.whole}{suffix}" for suffix in SUFFIXES] if preparer.whole else []
    if file := next((file for file in files if file.is_file()), None):
        records = [(preparer.split_of(record), record) for record in read_file(file, FLAG)]
        return {split: [record for own, record in records if own == split] for split in preparer.splits}
    return from_path(source, preparer.config, preparer.splits)


def _preparer(name: str) -> Preparer:
    name = ALIASES.get(name, name)
    if name not in PREPARERS:
        raise UserError("no such data set to prepare", key="paddock data", value=name, fix=suggest(name, list(NAMES)))
    return PREPARERS[name]


def _parser(preparer: Preparer) -> argparse.ArgumentParser:
    files = " and ".join(f"{split}.parquet" for split in preparer.splits)
    parser = Options(
        prog=f"paddock data {preparer.name}",
        description=f"Write {preparer.title} ({preparer.hub}) as {files}, ready for training.",
    )
    parser.add_argument("--local_save_dir", metavar="DIR", help=f"folder to write to (default: {preparer.folder})")
    parser.add_argument(FLAG, metavar="DIR", help="folder with a local copy of the raw data (default: ask the hub)")
    parser.add_argument("--local_dir", metavar="DIR", help="deprecated: the old name of --local_save_dir")
    parser.add_argument("--hdfs_dir", metavar="URL", help="refused: files are written to local folders only")
    if preparer.kinds:
        parser.add_argument("--split", required=True, choices=tuple(preparer.kinds), help="what the rows are for")
    return parser


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
    print("paddock: --local_dir is deprecated and still works; write --local_save_dir instead", file=sys.stderr)
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
        reason = "is also the folder to write to, where the raw files would be overwritten"
        raise UserError(reason, key=FLAG, value=source, fix="give another --local_save_dir")


def _rows(preparer: Preparer, raw: Splits) -> dict[str, list[Row]]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    rows: dict[str, list[Row]] = {}
    for split in preparer.splits:
        if not raw[split]:
            raise UserError(f"the {split} split of {preparer.title} has no records", fix="check the raw data")
        records = track(
            raw[split], f"{preparer.title} {split}", console=console, transient=True, disable=not console.is_terminal
        )
        prepared = enumerate(map(preparer.row, records))
        rows[split] = [with_origin(row, split, index) for index, row in prepared if row is not None]
    return rows
