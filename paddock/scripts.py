"""`paddock run SCRIPT`: launch scripts that call `python3 -m verl.trainer.main_ppo` run here unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import paddock
from paddock.door import PLAN_ONLY
from paddock.errors import UserError

OWN_ENVIRONMENT = "VERL_USE_UV"
"""Scripts that would build a Python environment of their own ask this variable; 0: they take the one they find."""

# While a script is planned these stand before the programs of their names: training commands are planned, a short
# question to Python is answered, and what would download, install, convert or start something is named and passed over.
_PLANNED = 'touch "{folder}/planned"; exec "{python}"'
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
    if not Path(script).is_file():
        raise UserError(
            "no such script", key="paddock run", value=script or None, fix="paddock run [--plan] SCRIPT.sh [args]"
        )
    with programs(plan) as folder:
        code = subprocess.run([*_interpreter(Path(script)), script, *rest], env=environment(plan, folder)).returncode
        if plan and code == 0 and Path(script).suffix != ".py" and not (folder / "planned").exists():
            raise UserError(
                "starts no training that can be planned",
                key="paddock run --plan",
                value=script,
                fix="python3 -m verl.trainer.main_ppo or paddock.trainer.main_ppo is what it must call",
            )
        return code


def _interpreter(script: Path) -> list[str]:
    return [sys.executable] if script.suffix == ".py" else ["bash"]


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
    package = Path(paddock.__file__).parent
    shims = next(folder for folder in (package / "compat", package.parent / "compat") if folder.is_dir())
    paths = [str(shims), str(package.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        OWN_ENVIRONMENT: os.environ.get(OWN_ENVIRONMENT, "0"),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        **({PLAN_ONLY: "1"} if plan else {}),
    }
