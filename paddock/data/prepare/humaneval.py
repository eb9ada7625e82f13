"""HumanEval: functions to complete, judged by the tests of each. A test set alone.  arXiv:2107.03374"""

from __future__ import annotations

import json

from paddock.data.prepare.preparer import ORIGIN, Preparer, Row, rule_row, training_columns
from paddock.data.prepare.records import Record

SOURCE = "openai/openai_humaneval"
INSTRUCTION = "Complete this Python function. Answer with the whole function in one ```python block."
COLUMNS = training_columns({**ORIGIN, "task_id": "string"})


def row(record: Record) -> Row:
    """The truth is what judges an answer: prompt, tests, and the name of the function."""
    truth = {name: record.text(name) for name in ("prompt", "test", "entry_point")}
    question = f"{INSTRUCTION}\n\n```python\n{truth['prompt'].strip()}\n```"
    return rule_row(SOURCE, question, "code", json.dumps(truth), task_id=record.text("task_id"))


PREPARER = Preparer(
    name="humaneval",
    title="HumanEval",
    hub=SOURCE,
    config=None,
    row=row,
    columns=COLUMNS,
    next_command="eval",
    splits=("test",),
    whole="HumanEval",
    split_of=lambda record: "test",
)
