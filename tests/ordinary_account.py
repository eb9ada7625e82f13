"""Runs a command as an ordinary account, from root: with a name, a home folder and no privilege.

The account is in /etc/passwd of a mount namespace of its own alone. There it also sees this interpreter and this
checkout, wherever they lie: root's own Python may be below /root, which no other account can enter.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from paddock.sandbox.inside import kernel  # noqa: E402

NAME, NUMBER, HOME = "paddock-tester", 61523, "/home/paddock-tester"


def command(*words: str, hidden: str = "") -> list[str]:
    """Returns the command line by which root runs this Python with `words` as the account, which sees nothing in the
    folder `hidden`."""
    return [sys.executable, "-B", __file__, hidden, *words]


def _hidden(path: str) -> str | None:
    """The first folder on the way to `path` that others cannot enter."""
    ways = [*reversed(Path(path).parents), Path(path)]
    return next((str(way) for way in ways if way.is_dir() and not way.stat().st_mode & 0o001), None)


def _show(paths: list[str]) -> None:
    """Puts a folder that can be entered in the place of each that cannot, with nothing but `paths` in it."""
    seen = {path: os.open(path, os.O_PATH) for path in paths if _hidden(path)}
    for folder in {_hidden(path) for path in seen}:
        kernel.mount("tmpfs", str(folder), "tmpfs", 0, "mode=755")
    for path, descriptor in seen.items():
        os.makedirs(path, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{descriptor}", path, None, kernel.MS_BIND | kernel.MS_REC)


def _become(hidden: str) -> None:
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    needed = {path for path in (sys.base_prefix, sys.prefix, str(ROOT), *sys.path) if os.path.isdir(path)}
    _show([path for path in needed if needed.isdisjoint(map(str, Path(path).parents))])
    with tempfile.NamedTemporaryFile("w") as file:
        lines = Path("/etc/passwd").read_text()
        file.write(f"{lines.rstrip()}\n{NAME}:x:{NUMBER}:{NUMBER}::{HOME}:/bin/sh\n")
        file.flush()
        os.chmod(file.name, 0o644)
        kernel.mount(file.name, "/etc/passwd", None, kernel.MS_BIND)
    kernel.mount("tmpfs", "/home", "tmpfs", 0, "mode=755")
    os.mkdir(HOME, 0o700)
    os.chown(HOME, NUMBER, NUMBER)
    if hidden:
        kernel.mount("tmpfs", hidden, "tmpfs", 0)
    os.setgroups([])
    os.setresgid(NUMBER, NUMBER, NUMBER)
    os.setresuid(NUMBER, NUMBER, NUMBER)
    os.chdir(HOME)


if __name__ == "__main__":
    _become(sys.argv[1])
    environment = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    environment |= {"HOME": HOME, "USER": NAME, "LOGNAME": NAME, "PYTHONPATH": str(ROOT)}
    os.execve(sys.executable, [sys.executable, "-B", *sys.argv[2:]], environment)
