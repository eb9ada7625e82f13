r"""MATH: competition problems, the answer in the solution's last `\boxed{...}`.  arXiv:2103.03874"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paddock.data.prepare.preparer import Preparer, Row, maths_row, training_schema
from paddock.data.prepare.records import Record

if TYPE_CHECKING:
    import pyarrow as pa

SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


def row(record: Record, split: str, index: int) -> Row:
    problem, solution = record.text("problem"), record.text("solution")
    truth = last_boxed(solution)
    if truth is None:
        raise record.error(
            "solution", r"no closed \boxed{...} in it", r"put the final answer in \boxed{...}, or drop the record"
        )
    prepared = maths_row(SOURCE, f"{problem} {INSTRUCTION}", truth, {"split": split, "index": index})
    labels = {name: record.values.get(name) for name in ("level", "type")}
    return prepared | {name: None if label is None else str(label) for name, label in labels.items()}


def schema() -> pa.Schema:
    return training_schema({"split": "string", "index": "int64"}, level="string", type="string")


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, or the last `\fbox{...}` where nothing is boxed; `$\boxed 5$` holds `5`."""
    for command in (r"\boxed", r"\fbox"):
        start = text.rfind(command)
        if start >= 0:
            rest = text[start + len(command) :].lstrip()
            return _braced(rest) if rest.startswith("{") else _unbraced(rest)
    return None


def _braced(text: str) -> str | None:
    r"""`{a{b}} c` -> `a{b}`. An escaped brace, `\{`, is a character like any other."""
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0 and token.group() == "}":
            return text[1 : token.start()]
    return None


def _unbraced(text: str) -> str | None:
    formula = re.split(r"\$|\\\]|\\\)|\n", text, maxsplit=1)[0]
    return formula.strip().rstrip(".") or None


PREPARER = Preparer(name="math", title="MATH", hub=SOURCE, config=None, row=row, schema=schema, examples=True)
