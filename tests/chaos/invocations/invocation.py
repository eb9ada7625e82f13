"""A bad invocation of a command: what is prepared, what is typed, what the answer must name, and how it is tried."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import multiprocessing
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paddock.facts.machine import cache_folder

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 90.0  # seconds for one invocation; most end within one
PRELOADED = ("torch", "transformers", "pyarrow.parquet", "paddock.cli", "paddock.trainer.reinforcement",
             "paddock.trainer.supervised", "paddock.commands.evaluation", "paddock.commands.generation")  # fmt: skip
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2  # capabilities with which root reads and writes whatever permissions say

DULL = {"trainer.total_training_steps=1"}
"""Arguments that say nothing about the mistake; modules of cases add theirs."""

Maker = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """`typed` is run in a folder that `made` has prepared. The answer must hold every text of `says`."""

    kind: str
    typed: tuple[str, ...]
    says: tuple[str, ...]
    made: tuple[Maker, ...] = ()
    heavy: bool = False
    """True if the command must import torch before it can know."""
    environment: tuple[tuple[str, str], ...] = ()
    allowed: tuple[str, ...] = ()
    """Names in the folder that the command may leave: what it wrote before the mistake could be known."""
    about: str = ""
    """What is wrong, where what is typed does not show it."""

    @property
    def title(self) -> str:
        shown = (text if len(text) < 80 else f"{text[:70]}..." for text in self.typed if text not in DULL)
        return f"{' '.join(shown)} {self.about}".strip().encode("unicode_escape").decode()


@dataclass(frozen=True)
class Answer:
    code: int | None
    """The exit code; None: it hung."""
    output: str
    left: tuple[str, ...]
    """Files and folders that were not there before."""

    def problems(self, case: Case) -> list[str]:
        """Everything in which this is not the answer that a user deserves."""
        message = self.output[self.output.rfind("paddock: ") :] if "paddock: " in self.output else self.output
        found = []
        if self.code is None:
            found.append(f"hung for {LIMIT:g} s")
        elif self.code != 2:
            found.append(f"exit code {self.code}")
        if "Traceback" in self.output:
            found.append("a traceback")
        if "\x1b" in self.output or "\x07" in self.output:
            found.append("a control character")
        found += [f"does not say {text!r}" for text in case.says if text not in message]
        if "\n  fix: " not in message:
            found.append("names no fix")
        if ": " not in message.removeprefix("paddock: ").partition("\n  fix: ")[0]:
            found.append("names no key")
        found += [f"left {name}" for name in self.left]
        return found


def prepare(case: Case, folder: Path) -> set[str]:
    folder.mkdir(parents=True)
    for make in case.made:
        make(folder)
    return entries(folder)


def entries(folder: Path) -> set[str]:
    """All names below a folder, but for what Python writes beside modules that it imports."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    return {name for name in found if "__pycache__" not in name}


def own_cache(folder: Path) -> dict[str, str]:
    """Returns a cache of the case's own: what another run has found out about the same rows is no part of the answer.
    Compiled kernels are the user's, or each case would wait for a compiler."""
    cache = folder.with_name("cache")
    (cache / "paddock").mkdir(parents=True, exist_ok=True)
    compiled = cache_folder("kernels")
    compiled.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (cache / "paddock" / "kernels").symlink_to(compiled)
    return {"XDG_CACHE_HOME": str(cache)}


def left_behind(case: Case, folder: Path, before: set[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name in entries(folder) - before if not name.startswith(case.allowed or ("\0",))))


def in_subprocess(case: Case, folder: Path) -> Answer:
    """The command as a user starts it."""
    before = prepare(case, folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **own_cache(folder), **dict(case.environment)}
    command = [sys.executable, "-m", "paddock.cli", *case.typed]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=LIMIT, preexec_fn=obey_permissions,
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = None, late.stdout or b""
    return Answer(code, output.decode(errors="replace"), left_behind(case, folder, before))


def in_process(case: Case, folder: Path) -> Answer:
    """The command called in this process: for mistakes that are known before torch is imported."""
    before, output, home = prepare(case, folder), io.StringIO(), os.getcwd()
    try:
        os.chdir(folder)
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            code = call(case.typed)
    finally:
        os.chdir(home)
    return Answer(code, output.getvalue(), left_behind(case, folder, before))


def in_fork(case: Case, folder: Path) -> Answer:
    """The command in a process of its own that has imported torch already: as a user starts it, but for that time."""
    before, log = prepare(case, folder), folder.with_name(f"{folder.name}.log")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    warm(context)
    child = context.Process(target=forked, args=(case.typed, own_cache(folder) | dict(case.environment), folder, log))
    child.start()
    child.join(LIMIT)
    code = child.exitcode
    if code is None:
        child.kill()
        child.join()
    return Answer(code, log.read_text(errors="replace"), left_behind(case, folder, before))


@functools.cache
def warm(context: multiprocessing.context.BaseContext) -> None:
    """Waits until the server has imported what it forks with; a slow import is nobody's mistake."""
    first = context.Process(target=int)
    first.start()
    first.join()


def forked(typed: tuple[str, ...], environment: dict[str, str], folder: Path, log: Path) -> None:
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    obey_permissions()
    os.chdir(folder)
    sys.path.insert(0, "")  # as `python -m` has it
    os.environ.update(environment)
    code = call(typed)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def call(typed: tuple[str, ...]) -> int:
    from paddock.cli import main

    try:
        return main(list(typed))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except Exception:
        import traceback

        traceback.print_exc()
        return 1


def obey_permissions() -> None:
    """Makes root subject to the permissions of files, as any user is. No core files, either."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (DAC_OVERRIDE, DAC_READ_SEARCH):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: what this process executes does not get it back
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    sets = (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for index in (0, 1, 2):  # effective, permitted, inheritable
        sets[index] &= ~(1 << DAC_OVERRIDE | 1 << DAC_READ_SEARCH)
    libc.capset(header, sets)
