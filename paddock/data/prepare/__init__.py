"""Public data sets as the parquet files training reads: `paddock data NAME`, `examples/data_preprocess/NAME.py`."""

from __future__ import annotations

from paddock.data.prepare.command import NAMES, main

__all__ = ["NAMES", "main"]
