"""`paddock run SCRIPT`: launch scripts that call `python3 -m verl.trainer.main_ppo` run here unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paddock.config.paths import missing_file
from paddock.door import CALLED, PLAN_ONLY
from paddock.errors import UserError
from paddock.facts.compat import PACKAGE, shims

OWN_ENVIRONMENT = "VERL_USE_UV"
"""Scripts that would build a Python environment of their own ask this variable; 0: they take the one they find."""

OURS = re.compile(r"\b(verl|paddock)\b", re.IGNORECASE)

# While a script is planned these stand before the programs of their names: training commands are planned, a short
# question to Python is answered, and what would download, install, convert or start something is named and passed over.
_PLANNED = 'exec "{python}"'
_PASSED_OVER = 'echo "paddock: not run while planning: $(basename "$0") $all" >&2\n'
_PYTHON = (
    '[ "$1" = -u ] && shift\n'
    f'case "$1 $2" in "-m verl.trainer.main_ppo"*|"-m paddock.trainer.main_ppo"*) {_PLANNED} "$@";;\n'
    '"-c "*|"-V "*) exec "{python}" "$@";; esac\n'
)
_BEHIND = 'while [ $# -gt 0 ]; do case "$1" in {word} exec "$@";; *) shift;; esac; done\n'
STAND_INS = {
    **dict.fromkeys(("python", "python3"), _PYTHON),
    "paddock": f'case "$1" in train|plan) {_PLANNED} -m paddock.cli "$@";; esac\n',
    "uv": _BEHIND.replace("{word}", "python|python3)"),
    "ray": _BEHIND.replace("{word}", "--) shift;"),
    **dict.fromkeys(("pip", "pip3", "hf", "huggingface-cli", "modelscope", "wget", "curl"), ""),
}


def run(arguments: list[str]) -> int:
    """The script's exit code. It finds this Python first on PATH, and the package `verl` of compat/ on PYTHONPATH."""
    plan = arguments[:1] == ["--plan"]
    script, *rest = arguments[plan:] or [""]
    if not script:
        raise UserError("no script is named", key="paddock run", fix="paddock run [--plan] SCRIPT.sh [args]")
    text = read_script(script)
    with programs(plan) as folder, tempfile.TemporaryDirectory(prefix="paddock-run-") as notes:
        called = Path(notes) / "called"
        command = [*_interpreter(script), script, *rest]
        code = subprocess.run(command, env=environment(plan, folder) | {CALLED: str(called)}).returncode
        if code == 0 and not called.exists():
            _started_nothing(script, text, plan)
        return code


def _interpreter(script: str) -> list[str]:
    return [sys.executable] if script.endswith(".py") else ["bash"]


def read_script(script: str) -> str:
    """Returns the script's text. What no interpreter would run is refused before anything of it has run."""
    if not os.path.isfile(script):
        raise missing_file("paddock run", script, "paddock run [--plan] SCRIPT.sh [args]")
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


def _started_nothing(script: str, text: str, plan: bool) -> None:
    """A script that ended well without a command of ours is a mistake. One that names us may have called us elsewhere:
    by ssh, in a container, as a job of a cluster."""
    fix = "python3 -m verl.trainer.main_ppo or paddock.trainer.main_ppo is what it must call"
    if plan:
        key = "paddock run --plan"
        raise UserError("starts no training that can be planned", key=key, value=script, fix=fix)
    if not OURS.search(text):
        raise _not_run(script, "starts nothing of Paddock's", fix)
    print(f"paddock: {script} has ended, and started no command of Paddock's on this machine", file=sys.stderr)


@contextmanager
def programs(plan: bool) -> Iterator[Path]:
    """The folder that comes first on PATH: this Python's own, or the stand-ins while planning."""
    if not plan:
        yield Path(sys.executable).parent
        return
    with tempfile.TemporaryDirectory(prefix="paddock-plan-") as name:
        for program, body in STAND_INS.items():
            file = Path(name) / program
            text = f'#!/bin/sh\nall="$*"\n{body}{_PASSED_OVER}'
            file.write_text(text.replace("{python}", sys.executable).replace("{folder}", name))
            file.chmod(0o755)
        yield Path(name)


def environment(plan: bool, folder: Path) -> dict[str, str]:
    paths = [str(shims()), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        OWN_ENVIRONMENT: os.environ.get(OWN_ENVIRONMENT, "0"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        **({PLAN_ONLY: "1"} if plan else {}),
    }
