"""Draws docs/images/plan.svg: what `paddock plan` prints for the README's command, up to the predicted time.

python tools/plan_picture.py
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "images" / "plan.svg"
COMMAND = (
    "paddock plan algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\\n"
    "    trainer.n_gpus_per_node=8 --gpu a100"
)
WIDTH = 118
LAST = "Values, and where they came from"
FONT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.S)
"""The picture loads nothing from the network: it is set in the reader's own monospace font."""


def printed() -> str:
    """Returns what the command prints, for a home folder that is nobody's."""
    words = shlex.split(COMMAND.replace("\\\n", " "))
    env = {**os.environ, "HOME": "/home/you", "COLUMNS": str(WIDTH), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "paddock.cli", *words[1:]]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def drawn(text: str) -> str:
    """Returns the part of a plan before its values, as SVG."""
    lines = [line.rstrip() for line in text.partition(LAST)[0].strip().splitlines()]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {COMMAND}\n", style="bold"))
    for line in lines:
        titled = bool(line) and not line.startswith(" ")
        console.print(Text(line, style="bold cyan" if titled else ""), soft_wrap=True)
    console.print()
    return console.export_svg(title="paddock plan", code_format=FONT, unique_id="plan")


if __name__ == "__main__":
    FILE.write_text(drawn(printed()), encoding="utf-8")
    print(FILE.relative_to(ROOT))
