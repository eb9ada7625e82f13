"""`paddock data from-jsonl FILE`: questions of one's own, one a line, as the parquet files training reads."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddock.core.options import Options
from paddock.data.prepare.preparer import ANSWERED, Row, training_columns, with_origin
from paddock.data.prepare.records import SUFFIXES, Record, read_file
from paddock.data.prepare.write import summary, write_splits
from paddock.errors import UserError

NAME = "from-jsonl"
COLUMNS = training_columns(ANSWERED)
RULE, MODEL = "rule", "model"


def run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if not 0 <= options.test_share < 1:
        raise UserError("is no share of the rows", key="--test-share", value=options.test_share, fix="0 to below 1")
    target = Path(os.path.abspath(os.path.expanduser(options.local_save_dir or Path(options.file).parent)))
    train, test = ([row_of(record, options) for record in _records(file)] for file in (options.file, options.test_file))
    splits = {"train": train, "test": test} if options.test_file else divided(train, options.test_share)
    written = {
        split: [with_origin(row, split, index) for index, row in enumerate(rows)]
        for split, rows in splits.items()
        if rows
    }
    write_splits(target, written, COLUMNS)
    print(summary(written, target, *next_step(options)))
    return 0


def next_step(options: argparse.Namespace) -> tuple[str, str]:
    """The command that trains on the rows, and the keys behind its files: who scores, if the rows do not say it."""
    if options.style == MODEL:
        return "train reward_model.enable=True", "reward_model.model.path=FOLDER (of the reward model)"
    return "train", "" if options.data_source else "reward=exact_match"


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog=f"paddock data {NAME}",
        description="Write questions of your own as train.parquet and test.parquet, ready for training.",
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="one JSON object a line (.jsonl, .jsonl.gz), or a JSON list of them (.json)")
    add("--prompt-key", default="prompt", metavar="KEY", help="field with the question, a text or messages")
    add(
        "--answer-key", default="answer", metavar="KEY", help="field with the true answer; not needed for --style model"
    )
    add("--data-source", metavar="NAME", help="picks the scorer, e.g. openai/gsm8k (default: the file's name)")
    add("--style", choices=(RULE, MODEL), default=RULE, help="who scores: a rule or function, or a reward model")
    add("--system", metavar="TEXT", help="a system message before each question")
    add("--instruction", metavar="TEXT", help="words added behind each question")
    add("--ability", default="general", metavar="WORD", help="a label")
    add("--test-file", metavar="FILE", help="questions to validate with")
    add(
        "--test-share",
        type=float,
        default=0.05,
        metavar="F",
        help="without --test-file, share held out (default: 0.05)",
    )
    add("--local_save_dir", metavar="DIR", help="folder to write to (default: beside FILE)")
    return parser


def _records(file: str | None) -> list[Record]:
    if file is None:
        return []
    if not file.endswith(SUFFIXES):
        raise UserError("is no JSON file by its name", key="FILE", value=file, fix=f"a name in {', '.join(SUFFIXES)}")
    records = read_file(Path(file), "FILE")
    if not records:
        raise UserError("holds no records", key="FILE", value=file, fix="one JSON object a line")
    return records


def row_of(record: Record, options: argparse.Namespace) -> Row:
    truth = _truth(record, options)
    prompt = _prompt(record, options)
    question = prompt[-1]["content"]
    return {
        "data_source": options.data_source or Path(options.file).name.split(".")[0],
        "prompt": prompt,
        "ability": options.ability,
        "reward_model": {"style": options.style, "ground_truth": truth},
        "extra_info": {"answer": truth, "question": question},
    }


def _prompt(record: Record, options: argparse.Namespace) -> list[Row]:
    from paddock.data.chat import messages_of  # brings Arrow, which a plan does without

    value = record.values.get(options.prompt_key)
    if value is None:
        record.text(options.prompt_key)  # which lists the fields there are
    asked = messages_of(value, record.location, options.prompt_key)
    turns: list[Row] = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    for turn in turns:
        if not isinstance(turn["content"], str):
            raise record.error(options.prompt_key, f"a message holds {turn['content']!r:.60}", "texts alone are taken")
    if options.system is not None:
        turns = [{"role": "system", "content": options.system}, *turns]
    if options.instruction is not None:
        turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']} {options.instruction}"}
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def _truth(record: Record, options: argparse.Namespace) -> str | None:
    """Returns the truth as a text: a number as it is written, a list or an object as JSON."""
    value: Any = record.values.get(options.answer_key)
    if value is None and options.style == MODEL:
        return None
    if value is None or value == "":
        have = ", ".join(map(repr, record.values)) or "no fields"
        fix = "name its field: --answer-key KEY; or --style model, if a reward model shall score"
        raise record.error(options.answer_key, f"there is no answer; the record has {have}", fix)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def divided(rows: list[Row], share: float) -> dict[str, list[Row]]:
    """Divides rows into training and held-out ones, the same on every machine; equal questions stay on one side.

    Of the questions, in the order of their hashes, those are held out whose rows together do not exceed the share; if
    each one is repeated more often than that, the one with the fewest rows.
    """
    names = [hashlib.blake2b(json.dumps(row["prompt"]).encode(), digest_size=8).digest() for row in rows]
    asked = wanted = round(share * len(rows)) or int(share > 0 and len(rows) > 1)
    held_out: set[bytes] = set()
    for name, repeats in sorted(Counter(names).items()):
        if repeats <= wanted:
            held_out.add(name)
            wanted -= repeats
    if asked and not held_out:
        held_out = {min(Counter(names).items(), key=lambda item: (item[1], item[0]))[0]}
    splits: dict[str, list[Row]] = {"train": [], "test": []}
    for name, row in zip(names, rows, strict=True):
        splits["test" if name in held_out else "train"].append(row)
    if not splits["train"]:
        raise UserError("nothing is left to train on", key="--test-share", value=share, fix="less, or more questions")
    return splits
