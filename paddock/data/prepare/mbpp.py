"""MBPP: small Python tasks in words, judged by a few asserts.  arXiv:2108.07732"""

from __future__ import annotations

import json

from paddock.data.prepare.preparer import ORIGIN, Preparer, Row, rule_row, training_columns
from paddock.data.prepare.records import Record

SOURCE = "google-research-datasets/mbpp"
INSTRUCTION = "Answer with the Python code in one ```python block. It must pass these tests:"
SPLIT_OF_TASKS = {"test": range(11, 511), "train": range(601, 975)}
"""The authors' numbers. 1 to 10 are for few-shot prompts, 511 to 600 for validation."""


def row(record: Record) -> Row:
    tests = record.values.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise record.error("test_list", f"must be a list of asserts, not {tests!r:.80}", "drop the record")
    truth = {"test_list": tests, "test_setup_code": record.values.get("test_setup_code") or ""}
    shown = "\n".join(tests)
    question = f"{record.text('text').strip()}\n\n{INSTRUCTION}\n\n```python\n{shown}\n```"
    return rule_row(SOURCE, question, "code", json.dumps(truth), task_id=_number(record))


def split_of(record: Record) -> str | None:
    number = _number(record)
    return next((split for split, numbers in SPLIT_OF_TASKS.items() if number in numbers), None)


def _number(record: Record) -> int:
    value = record.values.get("task_id")
    if not isinstance(value, int):
        raise record.error("task_id", f"must be a number, not {value!r:.80}", "check that this is the raw data set")
    return value


PREPARER = Preparer(
    name="mbpp",
    title="MBPP",
    hub=SOURCE,
    config="full",
    row=row,
    columns=training_columns({**ORIGIN, "task_id": "int64"}),
    next_command="plan algorithm.adv_estimator=grpo",
    whole="mbpp",
    split_of=split_of,
)
