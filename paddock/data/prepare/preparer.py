"""What a data set brings to its preparation, and the columns every prepared file has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paddock.data.prepare.records import SPLITS, Record

Row = dict[str, Any]
Columns = Mapping[str, Any]
"""The columns of a file by name: the name of an Arrow type, a list with the type of its items, or a struct as such a
mapping."""
MESSAGES = [{"role": "string", "content": "string"}]
ORIGIN = {"split": "string", "index": "int64"}
"""Says in the column `extra_info` where a row was in its data set."""
ANSWERED = {**ORIGIN, "answer": "string", "question": "string"}


@dataclass(frozen=True)
class Preparer:
    """How one public data set becomes training rows."""

    name: str
    title: str
    hub: str  # its name on the hub, and the `data_source` of every row: the scorer is chosen by it
    config: str | None  # the hub's configuration to take
    row: Callable[[Record], Row | None]  # None leaves the record out
    columns: Columns
    examples: bool = False  # also write the first row of each split as JSON
    next_command: str = "plan algorithm.adv_estimator=rloo"  # what the rows are for
    kinds: Mapping[str, Preparer] = field(default_factory=dict)  # what `--split` chooses from, each in a folder
    splits: tuple[str, ...] = SPLITS  # those that it is published in
    whole: str = ""  # the stem of a file of its authors' that holds all records
    split_of: Callable[[Record], str | None] = lambda record: None  # the split of a record of that file; None: neither

    @property
    def folder(self) -> str:
        """Returns the folder of the files, unless the user names another; recipes look for them there."""
        return f"~/data/{self.name}"


def with_origin(row: Row, split: str, index: int) -> Row:
    """Returns a row whose column `extra_info`, if it has one, also says where the row was in its data set."""
    if "extra_info" not in row:
        return row
    return row | {"extra_info": {"split": split, "index": index, **row["extra_info"]}}


def rule_row(source: str, question: str, ability: str, truth: str, /, **extra_info: Any) -> Row:
    """Returns a question whose answer a rule can check."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra_info,
    }


def training_columns(extra_info: Columns = ORIGIN, **others: Any) -> Columns:
    """Returns the columns of rows that are trained on; `others` stand behind them."""
    return {
        "data_source": "string",
        "prompt": MESSAGES,
        "ability": "string",
        "reward_model": {"style": "string", "ground_truth": "string"},
        "extra_info": extra_info,
        **others,
    }
