"""The command `paddock run`: starts a launch script among the stand-ins of launcher.py, and says how it ended."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import Any

from paddock.commands.guard import CALLED, CLOSED_PIPE, PLAN_ONLY
from paddock.config.paths import missing_file
from paddock.errors import UserError
from paddock.facts.compat import PACKAGE, SERVES, python_path
from paddock.verl.scripts.by_hand import installed
from paddock.verl.scripts.launcher import FOLDER, LAUNCHERS, OTHERS, OVERRIDES, PLANNED, PREFIX, PROGRAMS

Process = subprocess.Popen[bytes]
OWN_ENVIRONMENT = "VERL_USE_UV"
"""Scripts that would build a Python environment of their own ask this variable; 0: they take the one they find."""

USAGE = "paddock run [--plan] [--set key=value ...] SCRIPT.sh [args]"
PLAN_SECONDS = 300
"""Seconds after which a script that is planned counts as one that never ends."""
LINGER = 1.0
"""Seconds in which processes of a script that has ended may end as well; others are left in the background."""
STOPPED = "stopped"
SHELL = Path(__file__).parent / "shell.bash"
ACTIVATES = re.compile(r"^\s*(source|\.)\s+\S*(activate|set_env\.sh|setvars\.sh|conda\.sh)\b", re.MULTILINE)
OURS = re.compile(r"\b(verl|paddock)\b", re.IGNORECASE)


def run(arguments: list[str]) -> int:
    """Returns the script's exit code; while planning, that of the first command that could not be planned."""
    plan, overrides, script, rest = read_arguments(arguments)
    text = read_script(script)
    if version := installed():
        print(f"paddock: verl {version} is installed here; under `paddock run` Paddock's serves", file=sys.stderr)
    folder, left = Path(tempfile.mkdtemp(prefix=PREFIX)), False
    try:
        write_programs(folder / PROGRAMS, plan)
        environment = surroundings(folder, plan, overrides, bool(ACTIVATES.search(text)))
        command = [sys.executable if script.endswith(".py") else "bash", script, *rest]
        code, left = (_planned(command, environment, script), False) if plan else _ended(command, environment)
        if (folder / STOPPED).exists():
            raise _not_run(script, (folder / STOPPED).read_text().strip(), "start what it waits for, or leave it out")
        called, others = Path(environment[CALLED]), folder / OTHERS
        if not left and not called.exists():
            programs = others.read_text().splitlines() if others.exists() else []
            _started_nothing(script, text, plan, code, programs or ([script] if script.endswith(".py") else []))
        return _planned_code(code, called.read_text().split() if called.exists() else []) if plan else code
    finally:
        if not left:
            shutil.rmtree(folder, ignore_errors=True)


def _planned_code(code: int, ends: list[str]) -> int:
    """Returns the exit code of a plan: the script's own, else that of the first command that could not be planned."""
    refused = next((int(end) for end in ends if int(end) not in (0, CLOSED_PIPE)), 0)
    if code and ends and not refused:
        print(f"paddock: {len(ends)} planned; the script itself ended with exit code {code}", file=sys.stderr)
    return code or refused


def read_arguments(arguments: list[str]) -> tuple[bool, list[str], str, list[str]]:
    """Returns whether to plan, overrides for each training command, the script, and the script's own arguments."""
    plan, overrides, left = False, [], list(arguments)
    while left and left[0] in ("--plan", "--set"):
        if left.pop(0) == "--plan":
            plan = True
            continue
        if not left or "=" not in left[0]:
            raise UserError("needs key=value", key="paddock run --set", value=left[0] if left else None, fix=USAGE)
        overrides.append(left.pop(0))
    if not left:
        raise UserError("no script is named", key="paddock run", fix=USAGE)
    return plan, overrides, left[0], left[1:]


def _ended(command: list[str], environment: dict[str, str]) -> tuple[int, bool]:
    """Returns the exit code, and whether the script has left processes in the background, which need the stand-ins.

    Ctrl-C goes to the script as well, whose training then ends with a checkpoint: it is awaited.
    """
    with _started(command, environment) as (process, alive):
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code, not select([alive], [], [], LINGER)[0]
            except KeyboardInterrupt:
                continue


def _planned(command: list[str], environment: dict[str, str], script: str) -> int:
    """Returns the exit code. A script that is planned reads no keyboard, and what it starts in the background is
    awaited, for a limited time."""
    with _started(command, environment, stdin=subprocess.DEVNULL, start_new_session=True) as (process, alive):
        try:
            if select([alive], [], [], PLAN_SECONDS)[0]:
                return process.wait()
            reason = f"does not end within {PLAN_SECONDS} s of planning"
            raise _not_run(script, reason, "leave out what it waits for")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _started(command: list[str], environment: dict[str, str], **options: Any) -> Iterator[tuple[Process, int]]:
    """The script, and a file that can be read once the last of its processes has ended."""
    alive, held = os.pipe()
    try:
        process = subprocess.Popen(command, env=environment, pass_fds=[held], **options)
        os.close(held)
        yield process, alive
    finally:
        os.close(alive)


def read_script(script: str) -> str:
    """Returns the script's text. What no interpreter would run is refused before anything of it has run."""
    if not os.path.isfile(script):
        raise missing_file("paddock run", script, USAGE)
    try:
        content = Path(script).read_bytes()
    except OSError as error:
        raise _not_run(script, f"cannot be read: {error.strerror}", "make it readable") from error
    if b"\0" in content:
        raise _not_run(script, "is no script: it holds zero bytes", "name the launch script")
    if script.endswith(".py"):
        try:
            compile(content, script, "exec")
        except (SyntaxError, ValueError) as error:
            raise _not_run(script, f"cannot be run: {type(error).__name__}: {error}", "mend the script") from error
    else:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, errors="replace")
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["bash gave no reason"])[0]
            raise _not_run(script, f"cannot be run: {reason}", "mend the script")
    return content.decode(errors="replace")


def _not_run(script: str, reason: str, fix: str) -> UserError:
    return UserError(reason, key="paddock run", value=script, fix=fix)


def _started_nothing(script: str, text: str, plan: bool, code: int, others: list[str]) -> None:
    """A script that ended well without a command of ours is a mistake. One that names us may have called us elsewhere:
    by ssh, in a container, as a job of a cluster. `others`: Python programs of others' that it called."""
    fix = "python3 -m verl.trainer.main_ppo or paddock.trainer.main_ppo is what it must call"
    own = f": {others[-1]} is a program of its own" if others else ""
    if others:
        fix += "; docs/en/from_trl.md has the settings of TRL and trainers like it, docs/en/from_verl.md those of verl"
    if code:
        if others and not plan:
            print(f"paddock: {script} started no command of Paddock's{own}\n  fix: {fix}", file=sys.stderr)
        return
    if plan:
        key = "paddock run --plan"
        raise UserError(f"starts no training that can be planned{own}", key=key, value=script, fix=fix)
    if not OURS.search(text):
        raise _not_run(script, f"starts nothing of Paddock's{own}", fix)
    print(f"paddock: {script} has ended, and started no command of Paddock's on this machine", file=sys.stderr)


def write_programs(folder: Path, plan: bool) -> None:
    """Writes a file for each program that has a stand-in: it comes first on PATH, and calls the launcher."""
    folder.mkdir()
    begin = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); from paddock.verl.scripts.launcher import main; "
    for name in PLANNED if plan else LAUNCHERS:
        call = [sys.executable, "-I", "-S", "-c", f"{begin}sys.exit(main(sys.argv[1:]))", name]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(call)} "$@"\n')
        (folder / name).chmod(0o755)


def surroundings(folder: Path, plan: bool, overrides: list[str], activates: bool) -> dict[str, str]:
    """Returns the environment of a script: this Python first on PATH, Paddock's `verl` first on PYTHONPATH, and the
    functions of shell.bash in every bash."""
    paths = [*python_path(), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        OWN_ENVIRONMENT: os.environ.get(OWN_ENVIRONMENT, "0"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(folder / PROGRAMS), str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "BASH_ENV": str(SHELL),
        "PADDOCK_RUN_BASH_ENV": os.environ.get("BASH_ENV" if FOLDER not in os.environ else "PADDOCK_RUN_BASH_ENV", ""),
        SERVES: "1",
        FOLDER: str(folder),
        CALLED: str(folder / "called"),
        OVERRIDES: json.dumps(overrides),
        "PADDOCK_RUN_ACTIVATES": "1" if activates else "",
        **({PLAN_ONLY: "1"} if plan else {}),
    }
