"""`paddock run SCRIPT`: launch scripts that call `python3 -m verl.trainer.main_ppo` run here unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import paddock
from paddock.door import PLAN_ONLY
from paddock.errors import UserError


def run(arguments: list[str]) -> int:
    """The script's exit code. It finds this Python first on PATH, and the package `verl` of compat/ on PYTHONPATH."""
    plan = arguments[:1] == ["--plan"]
    script, *rest = arguments[plan:] or [""]
    if not Path(script).is_file():
        raise UserError(
            "no such script", key="paddock run", value=script or None, fix="paddock run [--plan] SCRIPT.sh [args]"
        )
    return subprocess.run([*_interpreter(Path(script)), script, *rest], env=environment(plan)).returncode


def _interpreter(script: Path) -> list[str]:
    return [sys.executable] if script.suffix == ".py" else ["bash"]


def environment(plan: bool) -> dict[str, str]:
    package = Path(paddock.__file__).parent
    shims = next(folder for folder in (package / "compat", package.parent / "compat") if folder.is_dir())
    paths = [str(shims), str(package.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        **({PLAN_ONLY: "1"} if plan else {}),
    }
