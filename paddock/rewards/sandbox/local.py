"""The sandbox of this machine: cells that are kept warm, and the refusal to run anything where none can be built."""

from __future__ import annotations

import os
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from paddock.errors import UserError
from paddock.rewards.sandbox.cell import Cell, CellFailed, CellLost
from paddock.rewards.sandbox.program import Program, Result, SandboxBroken, Settings

KEY = "reward_model.sandbox.isolation"
CANDIDATES = {"auto": ("bubblewrap", "unshare")}
SWITCHES = {
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "10000"),
}
"""Settings of Linux that forbid ordinary users what the walls are made of: the value that forbids, and one that does
not."""
TRIES = 2


class LocalSandbox:
    """Runs programs in at most `size` cells. A context manager: nothing runs any more when it is left.

    >>> with LocalSandbox(settings) as sandbox:
    ...     sandbox.run(Program("print(int(input()) + 1)", stdin="41")).stdout
    '42\\n'
    """

    def __init__(self, settings: Settings, size: int = 1):
        self.settings, self.at_once = settings, size
        self.isolation, first = _first_cell(settings)
        self._idle: queue.LifoQueue[Cell | None] = queue.LifoQueue()
        for place in range(size):
            self._idle.put(first if place == 0 else None)

    def __enter__(self) -> LocalSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for programs that are running. One that is run later gets a new cell."""
        cells = [self._idle.get() for _ in range(self.at_once)]
        for cell in cells:
            if cell:
                cell.close()
            self._idle.put(None)

    def run(self, program: Program, seconds: float | None = None) -> Result:
        """Any thread may call it; it waits for a free cell."""
        seconds = self.settings.timeout if seconds is None else seconds
        cell = self._idle.get()
        failure = CellFailed()
        try:
            for _ in range(TRIES):
                cell = cell or self._new_cell()
                try:
                    return cell.run(program, seconds)
                except CellFailed as error:
                    failure = error
                    cell.close()
                    cell = None
            if not isinstance(failure, CellLost) or not self._works():
                raise SandboxBroken(str(failure)) from failure
            return Result("killed", checks=("killed",) * len(program.checks), detail=str(failure))
        finally:
            if cell and not cell.reusable:
                cell.close()
                cell = None
            self._idle.put(cell)

    def _new_cell(self) -> Cell:
        try:
            return Cell(self.isolation, self.settings)
        except CellFailed as error:
            raise SandboxBroken(str(error)) from error

    def _works(self) -> bool:
        """Whether an honest program runs. Then one that takes its cells with it is to blame, and not the machine."""
        cell = self._new_cell()
        try:
            return cell.run(Program(""), self.settings.timeout).passed or bool(self.settings.command)
        except CellFailed:
            return False
        finally:
            cell.close()

    def run_all(self, programs: Sequence[Program], seconds: float | None = None) -> list[Result]:
        if self.at_once == 1:
            return [self.run(program, seconds) for program in programs]
        with ThreadPoolExecutor(self.at_once) as threads:
            return list(threads.map(lambda program: self.run(program, seconds), programs))


def _first_cell(settings: Settings) -> tuple[str, Cell]:
    reasons = []
    for isolation in CANDIDATES.get(settings.isolation, (settings.isolation,)):
        try:
            return isolation, Cell(isolation, settings)
        except CellFailed as error:
            reasons.append(f"{isolation}: {error}")
    raise UserError(
        f"programs cannot be kept apart from this machine ({'; '.join(reasons)})",
        key=KEY,
        value=settings.isolation,
        fix="; ".join(_ways_out()),
    )


def _ways_out() -> list[str]:
    ways = []
    for name, (forbids, allows) in SWITCHES.items():
        file = Path("/proc/sys") / name
        if os.access(file, os.R_OK) and file.read_text().strip() == forbids:
            ways.append(f"as root: sysctl -w {name.replace('/', '.')}={allows}")
    if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")):
        ways.append(
            "start the container with --cap-add SYS_ADMIN --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined"
        )
    return [
        *ways,
        "or let a service run them: reward_model.sandbox_fusion.url=http://host:8080/run_code",
        f"or, if the model's programs may do what you may do: {KEY}=unsafe",
    ]
