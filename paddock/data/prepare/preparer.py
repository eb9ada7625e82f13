"""What a data set brings to its preparation, and the columns every prepared file has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.data.prepare.records import Record

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
    row: Callable[[Record, str, int], Row]
    schema: Callable[[], pa.Schema]
    examples: bool = False  # also write the first row of each split as JSON

    @property
    def folder(self) -> str:
        """Where the files go unless the user says otherwise, and where recipes look for them."""
        return f"~/data/{self.name}"


def maths_row(source: str, question: str, truth: str, extra_info: Row) -> Row:
    """A question whose answer a rule can check."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra_info,
    }


def training_schema(extra_info: Mapping[str, str], **columns: str) -> pa.Schema:
    """The columns of a prepared file; `extra_info` and further `columns` are given as names and Arrow types."""
    import pyarrow as pa

    def fields(types: Mapping[str, str]) -> list[pa.Field]:
        return [pa.field(name, pa.type_for_alias(alias)) for name, alias in types.items()]

    return pa.schema(
        [
            pa.field("data_source", pa.string()),
            pa.field("prompt", pa.list_(pa.struct(fields({"role": "string", "content": "string"})))),
            pa.field("ability", pa.string()),
            pa.field("reward_model", pa.struct(fields({"style": "string", "ground_truth": "string"}))),
            pa.field("extra_info", pa.struct(fields(extra_info))),
            *fields(columns),
        ]
    )
