"""What `make keys-reference` generates about keys, for completion without the schema."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("known.json")


@cache
def known() -> dict[str, Any]:
    """`keys`: of each key its values, and whether it is a path; `commands`: of each command
    that takes keys the patterns of those that it reads, and its short names; `arguments`: words of other commands."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
