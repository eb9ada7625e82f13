"""`paddock verl on|off|status`: whether `python3 -m verl.trainer.main_ppo`, typed by hand, starts Paddock in this
environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from paddock.errors import UserError
from paddock.facts.compat import shims

USAGE = "paddock verl on|off|status"
NAME = "paddock_verl.pth"
"""Lines of such a file in site-packages come last on sys.path, so an installed verl comes before Paddock's."""
WHERE = "from importlib.util import find_spec; found = find_spec('verl'); print(found.origin if found else '')"


def run(arguments: list[str]) -> int:
    """Adds the name, takes it away, or says whose it is."""
    if len(arguments) > 1 or (arguments and arguments[0] not in ("on", "off", "status")):
        raise UserError("takes one word", key="paddock verl", value=" ".join(arguments), fix=USAGE)
    chosen = arguments[0] if arguments else "status"
    if chosen == "on":
        if version := installed():
            reason = f"verl {version} is installed in this environment, and keeps its name"
            raise UserError(reason, key="paddock verl", value="on", fix="`paddock run SCRIPT`, or uninstall verl")
        _write(f"{shims()}\n")
    elif chosen == "off":
        _write(None)
    print(whose())
    return 0


def installed() -> str | None:
    """Returns the version of verl itself in this environment, None without one."""
    try:
        return metadata.version("verl")
    except metadata.PackageNotFoundError:
        return None


def whose() -> str:
    """Returns a line that says who answers to `verl` in a new Python of this environment, outside any checkout."""
    question = [sys.executable, "-P", "-c", WHERE]
    place = subprocess.run(question, capture_output=True, text=True, cwd=Path(sys.executable).anchor).stdout.strip()
    if not place:
        return "verl: no such package here; `paddock verl on` gives the name to Paddock in this environment"
    ours = Path(place).is_relative_to(shims())
    return f"verl: {'Paddock' if ours else 'verl itself'}, {place}" + ("" if ours else "; Paddock's is not used")


def _write(text: str | None) -> None:
    """Writes the file into this environment's site-packages, or removes it."""
    file = Path(sysconfig.get_path("purelib")) / NAME
    try:
        if text is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(text)
    except OSError as error:
        reason = f"cannot be written: {error.strerror}"
        raise UserError(reason, key="paddock verl", value=file, fix="a virtual environment of your own") from error
