"""HumanEval: functions to complete, judged by the tests of each. A test set alone.  arXiv:2107.03374"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from paddock.data.prepare.preparer import Preparer, Row, rule_row, training_schema
from paddock.data.prepare.records import Record

if TYPE_CHECKING:
    import pyarrow as pa

SOURCE = "openai/openai_humaneval"
INSTRUCTION = "Complete this Python function. Answer with the whole function in one ```python block."


def row(record: Record, split: str, index: int) -> Row:
    """The truth is what judges an answer: prompt, tests, and the name of the function."""
    truth = {name: record.text(name) for name in ("prompt", "test", "entry_point")}
    question = f"{INSTRUCTION}\n\n```python\n{truth['prompt'].strip()}\n```"
    extra_info = {"split": split, "index": index, "task_id": record.text("task_id")}
    return rule_row(SOURCE, question, "code", json.dumps(truth), extra_info)


def schema() -> pa.Schema:
    return training_schema({"split": "string", "index": "int64", "task_id": "string"})


PREPARER = Preparer(
    name="humaneval",
    title="HumanEval",
    hub=SOURCE,
    config=None,
    row=row,
    schema=schema,
    next_command="eval",
    splits=("test",),
    whole="HumanEval",
    split_of=lambda record: "test",
)
