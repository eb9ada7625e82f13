"""Keys that no code acts on: the last name of each key must stand in a file that does more than declare or show it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

SHOWING = ("config/schema.py", "config/roles.py", "config/engine.py", "verl/", "help/", "plan/", "report/")
"""Files that declare keys, translate them or show them."""


def unread_keys(package: Path, keys: Iterable[str]) -> set[str]:
    acting = (path for path in package.rglob("*.py") if not path.relative_to(package).as_posix().startswith(SHOWING))
    words = {word for path in acting for word in re.findall(r"\w+", path.read_text())}
    return {key for key in keys if key.rpartition(".")[2] not in words}
