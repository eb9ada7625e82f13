"""The sandbox of this machine: cells that are kept warm, and the refusal to run anything where none can be built."""

from __future__ import annotations

import os
import queue
import time
from pathlib import Path

from paddock.errors import UserError
from paddock.sandbox.cell import Cell, CellFailed
from paddock.sandbox.program import Program, Result, Runner, SandboxBroken, SandboxSettings

KEY = "reward_model.sandbox.isolation"
SWITCHES = {
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "user/max_user_namespaces": ("0", "10000"),
}
"""Settings of Linux that can forbid ordinary users to make namespaces: the value that forbids, and one that does
not."""
TRIES = 2
PAUSES = (0.0, 0.5, 1.5, 3.0)  # seconds before an honest program is tried, which tells a broken machine from a busy one


class LocalSandbox(Runner):
    """Runs programs in at most `size` cells.

    >>> with LocalSandbox(settings) as sandbox:
    ...     sandbox.run(Program("print(int(input()) + 1)", stdin="41")).stdout
    '42\\n'
    """

    def __init__(self, settings: SandboxSettings, size: int = 1):
        super().__init__(settings, size)
        self.isolation, first = _first_cell(settings)
        self.guard = _guard(first)
        """What bounds the memory of a program, in words."""
        self._idle: queue.LifoQueue[Cell | None] = queue.LifoQueue()
        for place in range(size):
            self._idle.put(first if place == 0 else None)

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
        try:
            for _ in range(TRIES):
                try:
                    cell = cell or Cell(self.isolation, self.settings)
                    return cell.run(program, seconds)
                except CellFailed as error:
                    failure = error
                    if cell:
                        cell.close()
                    cell = None
            if not self._works():
                raise SandboxBroken(str(failure)) from failure
            return Result("killed", checks=("killed",) * len(program.checks), detail=str(failure))
        finally:
            if cell and not cell.reusable:
                cell.close()
                cell = None
            self._idle.put(cell)

    def _works(self) -> bool:
        """True if an honest program runs. Then the one that took its cells with it is to blame, and not the machine."""
        for pause in PAUSES:
            time.sleep(pause)
            try:
                cell = Cell(self.isolation, self.settings)
            except CellFailed:
                continue
            try:
                if cell.run(Program(""), self.settings.timeout).passed or self.settings.command:
                    return True
            except CellFailed:
                continue
            finally:
                cell.close()
        return False


def _first_cell(settings: SandboxSettings) -> tuple[str, Cell]:
    reasons = []
    for isolation in ("bubblewrap", "unshare") if settings.isolation == "auto" else (settings.isolation,):
        try:
            return isolation, Cell(isolation, settings)
        except CellFailed as error:
            reasons.append(f"{isolation}: {error}")
    reason = f"programs cannot be kept apart from this machine ({'; '.join(reasons)})"
    raise UserError(reason, key=KEY, value=settings.isolation, fix="; ".join(_ways_out()))


def _guard(cell: Cell) -> str:
    if cell.isolation == "unsafe":
        return "the address space of each process alone"
    watch = "a watch over its processes and what the kernel holds for them"
    return f"a control group (version {cell.group.version}), and {watch}" if cell.group else watch


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
