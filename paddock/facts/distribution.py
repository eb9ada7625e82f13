"""The name under which package indexes carry this project. `paddock` is the import name and the command alone."""

from __future__ import annotations

DISTRIBUTION = "paddock-rl"


def install_command(extra: str) -> str:
    """Returns the command that installs what `extra` needs; shells take brackets for a pattern, hence the quotes."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'
