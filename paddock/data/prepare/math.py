r"""MATH: competition problems, the answer in the solution's last `\boxed{...}`.  arXiv:2103.03874"""

from __future__ import annotations

from paddock.core.boxed import last_boxed
from paddock.data.prepare.preparer import Preparer, Row, rule_row, training_columns
from paddock.data.prepare.records import Record

SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


def row(record: Record) -> Row:
    problem, solution = record.text("problem"), record.text("solution")
    truth = last_boxed(solution)
    if truth is None:
        raise record.error(
            "solution", r"no closed \boxed{...} in it", r"put the final answer in \boxed{...}, or drop the record"
        )
    prepared = rule_row(SOURCE, f"{problem} {INSTRUCTION}", "math", truth)
    labels = {name: record.values.get(name) for name in ("level", "type")}
    return prepared | {name: None if label is None else str(label) for name, label in labels.items()}


PREPARER = Preparer(
    name="math",
    title="MATH",
    hub=SOURCE,
    config=None,
    row=row,
    columns=training_columns(level="string", type="string"),
    examples=True,
)
