"""Builds the wheel, installs it into a bare environment, and uses it from a folder that is not the checkout.

It trains, evaluates, reports, generates and exports there, and plans a launch script written for verl.

    python tools/test_wheel.py                      # this Python
    python tools/test_wheel.py python3.11 python3.13

`make test-wheel` runs it. Nothing of the checkout is importable there: what works is what the wheel holds.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info):
    guess = solution_str.strip()
    return sum(a == b for a, b in zip(guess, ground_truth)) / max(len(guess), len(ground_truth))
"""
SCRIPT = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.total_training_steps=1 $@\n"
LOADS = (
    "import sys, paddock; from transformers import AutoModelForCausalLM; "
    "AutoModelForCausalLM.from_pretrained('model'); print(paddock.__file__, sys.version.split()[0])"
)
RUN = "checkpoints/paddock/grpo"
COMMANDS = (
    ("paddock --version", r"^paddock \d"),
    ("paddock doctor env", r"(?i)extras"),
    ("paddock train data.train_files=mine.csv custom_reward_function.path=r.py trainer.total_training_steps=3",
     r"Done: 3 steps of 3"),
    (f"paddock eval model={RUN} data=mine.csv custom_reward_function.path=r.py", r"mean"),
    (f"paddock report {RUN} --out page.html", r"page\.html"),
    (f'paddock generate {RUN} prompt="2*3=" data.max_response_length=4', r""),
    (f"paddock export {RUN} model", r"model"),
    ("paddock run --plan run.sh trainer.device=cpu", r"Algorithm: grpo"),
    ("paddock verl on", r"^verl: Paddock, "),
    ("python -m verl.trainer.main_ppo --help", r"paddock train"),
)  # fmt: skip
"""Each command, and what it prints."""


def main(pythons: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="paddock-wheel-") as scratch:
        for python in pythons or [sys.executable]:
            try_wheel(python, Path(scratch))
    return 0


def try_wheel(python: str, scratch: Path) -> None:
    """Prints a line per stage with its seconds; exits with the output of the first that fails."""
    version = output([python, "-c", "import sys; print(sys.version.split()[0])"], scratch).strip()
    home = scratch / version
    venv, work = home / "venv", home / "somewhere else"
    work.mkdir(parents=True)
    bin_folder = venv / "bin"
    print(f"Python {version}", flush=True)

    def stage(name: str, *commands: list[str], pattern: str = "") -> None:
        began = time.monotonic()
        printed = "".join(output(command, work, bin_folder) for command in commands)
        if not re.search(pattern, printed, re.M):
            sys.exit(f"{name}: printed no {pattern!r}\n{printed}")
        print(f"  {time.monotonic() - began:6.1f} s  {name}", flush=True)

    inside = str(bin_folder / "python")
    limits = ["-c", str(ROOT / "constraints.txt")]
    stage("make a venv", [python, "-m", "venv", str(venv)])
    stage("build the wheel", [inside, *PIP, "wheel", "--no-deps", "--wheel-dir", str(home), str(ROOT)])
    (wheel,) = home.glob("paddock_rl-*.whl")
    stage("install torch", [inside, *PIP, "install", *limits, "torch"])
    stage(f"install {wheel.name}", [inside, *PIP, "install", *limits, str(wheel)])
    write_files(work)
    for command, pattern in COMMANDS:
        stage(command, ["bash", "-c", command], pattern=pattern)
    stage("load the export with transformers", [inside, "-c", LOADS], pattern=re.escape(str(venv)))


def write_files(folder: Path) -> None:
    """The user's data, reward function and launch script."""
    with (folder / "mine.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["question", "answer"])
        writer.writerows([f"{a}*{b}=", a * b] for a in range(2, 12) for b in range(2, 12))
    (folder / "r.py").write_text(REWARD)
    (folder / "run.sh").write_text(SCRIPT)


def output(command: list[str], folder: Path, first_on_path: Path | None = None) -> str:
    """What the command prints; its environment knows nothing of this checkout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PADDOCK_PLAN")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    if first_on_path:
        environment["PATH"] = f"{first_on_path}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
