"""What a data set brings to its preparation, and the columns every prepared file has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.data.prepare.records import SPLITS, Record

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]


@dataclass(frozen=True)
class Preparer:
    """How one public data set becomes training rows."""

    name: str
    title: str
    hub: str  # its name on the hub, and the `data_source` of every row: the scorer is chosen by it
    config: str | None  # the hub's configuration to take
    row: Callable[[Record, str, int], Row | None]  # None leaves the record out
    schema: Callable[[], pa.Schema]
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


def maths_row(source: str, question: str, truth: str, extra_info: Row) -> Row:
    return rule_row(source, question, "math", truth, extra_info)


def rule_row(source: str, question: str, ability: str, truth: str, extra_info: Row) -> Row:
    """A question whose answer a rule can check."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra_info,
    }


def message_type() -> pa.DataType:
    """Returns the Arrow type of a conversation."""
    import pyarrow as pa

    return pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())]))


def training_schema(extra_info: Mapping[str, str | pa.DataType], **columns: str) -> pa.Schema:
    """Returns the schema of a prepared file; `extra_info` and further `columns` are given as names and Arrow types."""
    import pyarrow as pa

    def fields(types: Mapping[str, str | pa.DataType]) -> list[pa.Field]:
        return [pa.field(name, pa.type_for_alias(one) if isinstance(one, str) else one) for name, one in types.items()]

    return pa.schema(
        [
            pa.field("data_source", pa.string()),
            pa.field("prompt", message_type()),
            pa.field("ability", pa.string()),
            pa.field("reward_model", pa.struct(fields({"style": "string", "ground_truth": "string"}))),
            pa.field("extra_info", pa.struct(fields(extra_info))),
            *fields(columns),
        ]
    )
