"""A control group of Linux that bounds the memory of one cell: processes, and all that the kernel holds for them.

Only some users may make one: root, and whoever was given a part of the tree (a user's systemd session, a job of a
cluster). Version 1 and version 2 of the interface both do.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NAME = "paddock-cell-"
PATIENCE = 1.0  # seconds for a group to be empty after its last process was waited for


class Files(NamedTuple):
    """The names under which a version of the interface has what is used here."""

    limit: str
    swap: str
    used: str
    events: str
    no_more_swap: bool
    """The limit of `swap` holds for swap alone, not for memory and swap together."""


VERSIONS = {
    1: Files("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control",
             False),
    2: Files("memory.max", "memory.swap.max", "memory.current", "memory.events", True),
}  # fmt: skip


class ControlGroup:
    """Made empty and without a limit; `remove` when all its processes have ended."""

    def __init__(self, folder: Path, version: int):
        self.folder, self.version, self.files = folder, version, VERSIONS[version]

    @property
    def members(self) -> Path:
        """A process joins by writing 0 to this file; its children are born in the group."""
        return self.folder / "cgroup.procs"

    def has_members(self) -> bool:
        return bool(self.members.read_text().strip())

    def allow(self, more: int) -> None:
        """Limits the group to what it uses now and so many bytes."""
        most = int((self.folder / self.files.used).read_text()) + more
        (self.folder / self.files.limit).write_text(str(most))
        with suppress(OSError):  # without swap there is no such file
            (self.folder / self.files.swap).write_text("0" if self.files.no_more_swap else str(most))

    def kills(self) -> int:
        """Returns the number of processes that the kernel killed because the group was at its limit."""
        try:
            lines = (self.folder / self.files.events).read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def remove(self) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > end:
                    return
                time.sleep(0.01)


def made_group(proc: Path = Path("/proc/self")) -> ControlGroup | None:
    """Returns a new group; None where this process may make none. Groups that were left behind are removed."""
    for parent, version in _parents(proc):
        if not os.access(parent, os.W_OK) or not os.access(parent / "cgroup.procs", os.W_OK):
            continue
        _remove_abandoned(parent)
        group = ControlGroup(parent / f"{NAME}{os.getpid()}-{secrets.token_hex(4)}", version)
        try:
            group.folder.mkdir()
        except OSError:
            continue
        if (group.folder / group.files.limit).exists():
            return group
        group.remove()
    return None


def _parents(proc: Path) -> list[tuple[Path, int]]:
    """Folders in which a group with a memory controller can be made.

    Version 2 allows no group beside processes, so there it is a neighbour of this process's own group, unless that
    would leave a limit that somebody set.
    """
    parents: list[tuple[Path, int]] = []
    try:
        own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [_mount(line) for line in (proc / "mountinfo").read_text().splitlines()]
    except (OSError, IndexError, ValueError):
        return []
    first = [path for _, controllers, path in own if "memory" in controllers.split(",")]
    second = [path for number, _, path in own if number == "0"]
    for kind, root, point, options in mounts:
        if kind == "cgroup" and first and "memory" in options.split(","):
            parents.append((_below(root, point, first[0]), 1))
        elif kind == "cgroup2" and second:
            group = _below(root, point, second[0])
            parents += [(folder, 2) for folder in _with_controller(group, Path(point))]
    return parents


def _mount(line: str) -> tuple[str, str, str, str]:
    """Type, root, mount point and options of a file system, of a line of mountinfo."""
    before, _, after = line.partition(" - ")
    kind, _, options = after.split(" ", 2)
    fields = before.split()
    return kind, fields[3], fields[4], options


def _below(root: str, point: str, path: str) -> Path:
    """Returns the folder of the group `path`, if the group `root` is mounted at `point`."""
    return Path(point) / os.path.relpath(path, root) if path.startswith(root) else Path(point) / path.lstrip("/")


def _with_controller(group: Path, top: Path) -> list[Path]:
    found = []
    while True:
        try:
            if "memory" in (group / "cgroup.subtree_control").read_text().split():
                found.append(group)
            if group == top or (group / "memory.max").read_text().strip() != "max":
                break
        except OSError:
            break
        group = group.parent
    return found


def _remove_abandoned(parent: Path) -> None:
    """Groups of processes that were killed. One that is in use cannot be removed."""
    for folder in parent.glob(f"{NAME}*"):
        owner = folder.name.removeprefix(NAME).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with suppress(OSError):
                folder.rmdir()
