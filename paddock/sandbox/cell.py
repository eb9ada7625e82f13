"""One cell: a warm, isolated interpreter that runs programs one after the other."""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from paddock.sandbox.cgroup import ControlGroup, made_group
from paddock.sandbox.inside import seccomp
from paddock.sandbox.inside.program import OUT_OF_MEMORY, OUT_OF_PROCESSES
from paddock.sandbox.oracle import guarded, with_modules
from paddock.sandbox.program import CAUSES, Program, Result, SandboxSettings, causes_of

INSIDE = Path(__file__).parent / "inside"
PACKAGES = Path(__file__).parents[2]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
FLAGS = ("-s", "-S", "-P")
BOOT = "import sys; sys.path.append(sys.argv[3]); from paddock.sandbox.inside.launch import main; main()"
TMP_MB, OUTPUT_MB = 64, 16
STARTING = 60.0  # seconds
SLACK = 5.0  # seconds beyond a program's limit, in which the guard must have answered
SIGNALS: dict[int, str] = {signal.SIGXCPU: "timeout", signal.SIGXFSZ: "output", signal.SIGSYS: "forbidden"}
EXITS = {0: "ok", OUT_OF_MEMORY: "memory", OUT_OF_PROCESSES: "processes"}


class CellFailed(Exception):
    """The cell could not be isolated; no fault of a program."""


class CellLost(CellFailed):
    """The cell gave no answer. A program may have brought it down, with itself or with the machine's memory."""


class Cell:
    """Runs programs; started when made. Not for two threads at a time."""

    def __init__(self, isolation: str, settings: SandboxSettings):
        self.isolation, self.settings = isolation, settings
        plan = plan_of(isolation, settings)
        self.group = None if isolation == "unsafe" else made_group()
        plan["group"] = str(self.group.members) if self.group else None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [*plan["python"], "-c", BOOT, str(theirs.fileno()), json.dumps(plan), str(PACKAGES)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env={"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
                start_new_session=True,
            )
        self.control = ours
        self._end = weakref.finalize(self, _end, self.control, self.process, self.group, os.getpid())
        hello = self._hello()
        self.group = self._bounded(self.group)
        self.reusable = bool(hello["nested"])
        """True if programs get namespaces of their own. If nested ones are forbidden, a cell serves one program."""

    def run(self, program: Program, seconds: float) -> Result:
        """Takes no longer than `seconds` and SLACK."""
        with ExitStack() as stack:
            setup = with_modules(program.checks, program.setup)
            tests = {"setup": setup, "checks": guarded(program.checks, setup), "entry": program.entry}
            texts = (program.code, program.stdin, "", "", "", json.dumps(tests))
            files = [stack.enter_context(_memory_file(text)) for text in texts]
            job = {
                "timeout": seconds,
                "memory_mb": self.settings.memory_limit_mb,
                "processes": self.settings.processes,
                "output_mb": OUTPUT_MB,
                "command": list(self.settings.command),
                "checked": bool(program.checks),
                "bounded": self.group is not None,
            }
            kills = self.group.kills() if self.group else 0
            try:
                socket.send_fds(self.control, [json.dumps(job).encode()], [file.fileno() for file in files])
                answer = self._receive(seconds + SLACK)
            except OSError as error:
                raise CellLost(f"the cell has ended: {error}") from error
            _, _, stdout, stderr, report, _ = (_content(file.fileno()) for file in files)
        if "lost" in answer:
            raise CellLost(str(answer["lost"]))
        if "broken" in answer:
            raise CellFailed(str(answer["broken"]))
        if self.group and self.group.kills() > kills:
            answer["ended_by"] = "memory"
        return result_of(answer, report, stdout, stderr, program)

    def close(self) -> None:
        """Ends the cell; nothing that ran in it is left when this returns."""
        self._end()

    def _hello(self) -> dict[str, Any]:
        try:
            answer = self._receive(STARTING)
        except OSError:
            answer = {}
        if "ready" in answer:
            return answer
        with suppress(OSError):
            self.control.close()
        reason = answer.get("failed")
        if reason is None:
            self.process.kill()
            assert self.process.stderr
            reason = self.process.stderr.read().decode(errors="replace").strip().splitlines()[-1:]
            reason = reason[0] if reason else "it ended without a word"
        self.close()
        raise CellFailed(reason)

    def _bounded(self, group: ControlGroup | None) -> ControlGroup | None:
        """The group with its limit, once the cell itself is in it; None if the kernel did not let it in."""
        if group is None:
            return None
        try:
            if group.has_members():
                group.allow(self.settings.memory_limit_mb << 20)
                return group
        except (OSError, ValueError):
            pass
        return None

    def _receive(self, seconds: float) -> dict[str, Any]:
        ready, _, _ = select.select([self.control], [], [], seconds)
        if not ready:
            raise TimeoutError(f"no answer within {seconds:g} s")
        message = self.control.recv(1 << 16)
        if not message:
            raise ConnectionResetError("no answer")
        with suppress(ValueError, RecursionError):
            answer = json.loads(message)
            if isinstance(answer, dict):
                return answer
        raise ConnectionResetError("an answer that cannot be read")


def plan_of(isolation: str, settings: SandboxSettings) -> dict[str, Any]:
    """Returns the plan of a cell for launch.py: which of this machine's paths are seen, and under which names."""
    if platform.system() != "Linux" or platform.machine() not in seccomp.NUMBERS:
        raise CellFailed(f"needs Linux on {' or '.join(seccomp.NUMBERS)}, not {platform.system()} {platform.machine()}")
    bubblewrap = shutil.which("bwrap")
    if isolation == "bubblewrap" and not bubblewrap:
        raise CellFailed("bwrap is not installed")
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    prefixes = (sys.base_prefix, sys.base_exec_prefix)
    seen = [*SYSTEM, *SETTINGS, *prefixes, *map(os.path.realpath, prefixes), *settings.readable]
    binds = {"/paddock/inside": str(INSIDE)}
    links: dict[str, str] = {}
    for path in dict.fromkeys(map(os.path.normpath, seen)):
        if os.path.islink(path) and path in SYSTEM:
            links[path] = os.readlink(path)
        elif os.path.exists(path) and not any(path.startswith(f"{folder}/") for folder in binds):
            binds[path] = os.path.realpath(path)
        elif path in settings.readable:
            raise CellFailed(f"{path}, which programs shall be able to read, is not there")
    if not any(python.startswith(f"{folder}/") for folder in binds.values()):
        binds[python] = python
    return {
        "isolation": isolation,
        "python": [python, *FLAGS],
        "bubblewrap": bubblewrap,
        "binds": binds,
        "links": links,
        "tmp_mb": TMP_MB,
        "send_buffer": _send_buffer(),
        "command": bool(settings.command),
    }


def _send_buffer() -> int:
    """Bytes of messages that a socket may have on their way. Inside the cell this cannot be read any more."""
    with socket.socket(socket.AF_UNIX) as any_socket:
        return any_socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


class Report(NamedTuple):
    """The facts that PID 1 wrote about a program's end."""

    checks: tuple[str, ...] = ()
    detail: str = ""
    broken: str = ""
    status: int | None = None
    left_running: bool = False


def report_of(written: bytes, checks: int) -> Report | None:
    """Reads a report; None if it cannot be read or has more than PID 1 writes, so that the end is unknown."""
    lines = written.splitlines()
    if (written and not written.endswith(b"\n")) or len(lines) > checks + 2:
        return None
    merged: dict[str, Any] = {}
    found: list[str] = []
    for line in lines:
        try:
            facts = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(facts, dict) or not _known(facts) or "status" in merged:
            return None
        found += [facts.pop("check")] if "check" in facts else []
        merged |= facts
    return Report(tuple(found), **merged) if len(found) <= checks else None


def _known(facts: Mapping[str, Any]) -> bool:
    """True if PID 1 writes such facts. `True` is an int too, but no status."""
    kinds = {"check": str, "detail": str, "broken": str, "status": int, "left_running": bool}
    return all(name in kinds and type(value) is kinds[name] for name, value in facts.items()) and (
        facts.get("check", "ok") in CAUSES
    )


def result_of(answer: Mapping[str, Any], written: bytes, stdout: bytes, stderr: bytes, program: Program) -> Result:
    """Returns the result of a program. The guard's answer names a limit that was passed, the report has the rest."""
    report = report_of(written, len(program.checks))
    texts = stdout.decode("utf-8", errors="replace"), stderr.decode("utf-8", errors="replace")
    seconds = float(answer.get("seconds", 0.0))
    if report is None:
        cause = answer.get("ended_by") or "killed"
        return Result(cause, *texts, seconds, causes_of((), cause, program), "the report of its end cannot be read")
    if report.broken:
        raise CellFailed(report.broken)
    found, ended_by = report.checks, answer.get("ended_by")
    complete = report.status is not None or ended_by == "timeout"  # it may be slow to end after the last check
    if program.checks and len(found) == len(program.checks) and complete and ended_by in (None, "timeout"):
        cause = next((check for check in found if check != "ok"), "ok")
    else:
        cause = _ending(answer, report, stdout, stderr)
        if program.checks and cause == "ok":  # it ended itself before all was asked
            cause = "error"
        if program.checks and len(found) == len(program.checks):
            found = ()
    if cause == "ok" and report.left_running:
        cause, found = "left_running", ()
    return Result(cause, *texts, seconds, causes_of(found, cause, program), report.detail)


def _ending(answer: Mapping[str, Any], report: Report, stdout: bytes, stderr: bytes) -> str:
    if answer.get("ended_by"):
        return str(answer["ended_by"])
    if max(len(stdout), len(stderr)) >= OUTPUT_MB << 20:
        return "output"
    if report.status is None:
        return "killed"
    try:
        code = os.waitstatus_to_exitcode(report.status)
    except ValueError:
        return "killed"
    return SIGNALS.get(-code, "killed") if code < 0 else EXITS.get(code, "error")


def _memory_file(text: str) -> BinaryIO:
    """Returns a file without a name, to be read from its start."""
    file = os.fdopen(os.memfd_create("program"), "w+b")
    file.write(text.encode("utf-8", errors="surrogatepass"))
    file.seek(0)
    return file


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, OUTPUT_MB << 20, 0)


def _end(control: socket.socket, process: subprocess.Popen[bytes], group: ControlGroup | None, owner: int) -> None:
    control.close()
    if os.getpid() != owner:  # in a fork of the trainer
        return
    try:
        process.wait(SLACK)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stderr:
        process.stderr.close()
    if group:
        group.remove()
