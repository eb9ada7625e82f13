"""Data sets under verl's name, for modules that hold one beside a tool."""

from __future__ import annotations

from typing import Any

from paddock.errors import UserError


class RLHFDataset:
    """Stands for verl's data set as a base class; it cannot be made."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise UserError(
            "verl's RLHFDataset is not there to build on",
            key="data.custom_cls.name",
            value=type(self).__name__,
            fix="a map-style torch Dataset whose items are rows, or files in data.train_files",
        )
