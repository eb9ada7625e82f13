"""Where work that would be done again is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """The user's own, for one kind of thing. It may not exist, nor be writable."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "paddock" / kind
