"""Plans every launch script of a checkout of verl, and prints a table of what became of each.

    python tools/verl_scripts.py CHECKOUT                          # from inside: the working folder is the checkout
    python tools/verl_scripts.py CHECKOUT --outside --out table.md
    python tools/verl_scripts.py CHECKOUT --only 'grpo_trainer/*' --out table.json
    python tools/verl_scripts.py CHECKOUT --run                    # ten of them train a step, on a CPU

Each `.sh` below CHECKOUT/examples runs through `paddock run --plan` in a folder of its own, with an empty home folder:

    planned    every training command of the script is planned; a mistake of its own behind them is named
    refused    by Paddock, in one message with the reason, exit code 2
    broken     the script's own fault: an error of bash or of a program that it calls; the table has bash's line
    TRACEBACK, HANG    faults of Paddock's

A script that demands a variable or arguments (`${X:?}`, an unset variable under `set -u`, a line `Usage: ... <name>`)
is first tried as it stands, then with plausible ones, which the table names. Exit code 1: a traceback or a hang.

With --run scripts really run, and are `trained`: one step of the built-in model, which `paddock run --set` gives them
with its data; nothing else of a script is changed. The ten are those of RUN below, unless --only names others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAIN = ("examples/ppo_trainer/", "examples/grpo_trainer/", "examples/rloo_trainer/")
FAULTS = ("TRACEBACK", "HANG")
GOOD = ("planned", "trained")
KINDS = (*GOOD, "refused", "broken", *FAULTS)
TRIES = 8
UNSET = re.compile(r"line \d+: (\w+): (?!command not found)\S")
EMPTY = re.compile(r"^paddock: ([\w.]+)=: must be", re.MULTILINE)
USAGE = re.compile(r"usage:.*?((?:\s<\w+>)+)", re.IGNORECASE)
PLAUSIBLE = (
    ("PATH|DIR|HOME|FILE|ROOT|MODEL", "/data/{name}"),
    ("IP|ADDR|HOST", "127.0.0.1"),
    ("GPU|NPROC", "8"),
    ("", "1"),
)
OURS = re.compile(r'File ".*/(paddock|compat)/|No module named .verl\.')
"""What a traceback names that is a fault of Paddock's. A script's own program may fail by itself."""

RUN = (
    "ppo_trainer/run_deepseek7b_llm.sh", "ppo_trainer/run_qwen2-7b_seq_balance.sh",
    "ppo_trainer/run_gemma.sh", "grpo_trainer/run_qwen2-7b_seq_balance.sh", "grpo_trainer/run_qwen3-8b.sh",
    "grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh", "rloo_trainer/run_qwen2-7b.sh",
    "remax_trainer/run_qwen2.5-3b_seq_balance.sh", "reinforce_plus_plus_trainer/run_qwen2-7b_math_rf.sh",
    "gpg_trainer/run_qwen2-7b_math.sh",
    *(f"{name}_trainer/run_qwen3_8b_fsdp.sh" for name in (
        "ppo", "grpo", "rloo", "remax", "reinforce_plus_plus", "gpg", "gspo", "gmpo", "cispo", "otb",
    )),
)  # fmt: skip
"""Ten scripts of verl 0.8, and ten of 0.9."""
_ROLLOUT = "actor_rollout_ref.rollout"
TINY = (
    "actor_rollout_ref.model.path=builtin:tiny", "critic.model.path=builtin:tiny",
    "data.train_files=builtin:addition/train", "data.val_files=builtin:addition/test", "data.train_batch_size=8",
    "data.max_prompt_length=16", "data.max_response_length=8", "data.val_max_samples=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=4", f"{_ROLLOUT}.name=embedded",
    f"{_ROLLOUT}.tensor_model_parallel_size=1", "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=1",
    "trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.logger=[console]",
    "trainer.default_local_dir=checkpoints/tiny",
)  # fmt: skip
"""One step of the built-in model on one core, whatever a script asks for."""


@dataclass
class Row:
    """One script of the table: what became of it, why, and what it was given beside its own text."""

    script: str
    kind: str
    why: str = ""
    given: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def value_for(name: str, text: str) -> str:
    """Returns the script's own default, if it comes too late, or a value that fits the name."""
    if default := re.search(rf"^\s*{name}=\$\{{{name}:-([\w./-]+)\}}", text, re.MULTILINE):
        return default[1]
    value = next(value for words, value in PLAUSIBLE if re.search(words, name.upper()))
    return value.format(name=name.strip("<>").lower())


def workplace(checkout: Path, folder: Path, outside: bool) -> Path:
    """Returns the working folder of a script: the checkout's entries as links, so that logs fall elsewhere."""
    place = folder / "work"
    place.mkdir()
    for entry in [] if outside else checkout.iterdir():
        (place / entry.name).symlink_to(entry)
    return place


def call(script: Path, place: Path, given: dict[str, str], options: argparse.Namespace) -> tuple[int | None, str]:
    """Returns exit code and output of `paddock run`, None for a script that ran into the limit."""
    arguments = [given[name] for name in given if name.startswith("<")]
    environment = {**os.environ, **{name: value for name, value in given.items() if not name.startswith("<")}}
    environment |= {"HOME": str(place.parent), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    }  # compiled kernels
    how = [word for override in TINY for word in ("--set", override)] if options.run else ["--plan"]
    command = [sys.executable, "-P", "-m", "paddock.cli", "run", *how, str(script), *arguments]
    process = subprocess.Popen(
        command, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=options.limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


def verdict(code: int | None, output: str) -> tuple[str, str]:
    """Returns the kind of an ended script, and the line that says why."""
    lines = output.splitlines()
    messages = [n for n, line in enumerate(lines) if line.startswith("  fix: ")]
    if "Traceback (most recent call last)" in output and OURS.search(output):
        return "TRACEBACK", last(lines)
    if code is None:
        return "HANG", last(lines)
    if messages:
        first = messages[0]
        return "refused", f"{lines[first - 1].removeprefix('paddock: ')}; {lines[first].strip()}"
    if trained := re.search(r"^Done: \d+ steps? of \d+", output, re.MULTILINE):
        return "trained", trained[0] if code == 0 else f"{trained[0]}, then exit code {code}: {last(lines)}"
    if code == 0:
        return "planned", ""
    wrong = [line for line in lines if re.search(r": line \d+: ", line)]
    planned = re.search(r"^paddock: \d+ planned; the script itself ended", output, re.MULTILINE)
    return "planned" if planned else "broken", f"exit code {code}: {wrong[-1] if wrong else last(lines)}"


def last(lines: list[str]) -> str:
    told = [line for line in lines if line.strip() and not line.startswith("+")]
    return told[-1].strip() if told else "no output"


def demands(script: Path, output: str, given: dict[str, str]) -> list[str]:
    """Returns the variables and arguments that a broken script asks for and was not given."""
    if usage := USAGE.search(output):
        return [name for name in re.findall(r"<\w+>", usage[1]) if name not in given]
    text = script.read_text(errors="replace")
    names = UNSET.findall(output)
    for key in EMPTY.findall(output):  # trainer.nnodes=$NNODES, and NNODES is unset
        for name in re.findall(rf"{re.escape(key)}=[\"']?\$\{{?(\w+)", text):
            names += re.findall(rf"^\s*{name}=\$\{{?(\w+)\}}?$", text, re.MULTILINE) or [name]
    if not names:  # `echo "set MODEL_PATH"; exit 1`
        told = [line for line in output.splitlines() if line.strip() and not line.startswith(("+", "paddock:"))][-4:]
        names = [name for line in told for name in re.findall(r"\b[A-Z][A-Z0-9_]{3,}\b", line)]
        names = [name for name in names if not re.search(rf"\b{name}(:?-|=)", text)]
    read = [name for name in names if re.search(rf"\$\{{?{name}\b", text)]
    return [name for name in read if name not in given and name != "COMMAND"]


def row_of(script: Path, checkout: Path, arguments: argparse.Namespace) -> Row:
    given: dict[str, str] = {}
    began = time.monotonic()
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory(prefix="verl-scripts-") as name:
            folder = Path(name).resolve()
            place = workplace(checkout, folder, arguments.outside)
            code, output = call(script, place, given, arguments)
            kind, why = verdict(code, output.replace(str(folder), "~").replace(str(checkout), "CHECKOUT"))
        asked = demands(script, output, given) if kind in ("broken", "refused") else []
        if not asked:
            break
        given |= {name: value_for(name, script.read_text(errors="replace")) for name in asked}
    return Row(str(script.relative_to(checkout)), kind, why, given, round(time.monotonic() - began, 1))


def totals(rows: list[Row]) -> list[str]:
    """Returns a line for all scripts, and one for those of PPO, GRPO and RLOO."""
    lines = []
    for title, some in (("all", rows), ("ppo, grpo, rloo", [row for row in rows if row.script.startswith(MAIN)])):
        counts = Counter(row.kind for row in some)
        helped = sum(row.kind in GOOD and bool(row.given) for row in some)
        told = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind] or kind in FAULTS)
        lines.append(f"{title}: {len(some)} scripts: {told}; {helped} of the good were given variables")
    return lines


def markdown(rows: list[Row]) -> str:
    lines = ["| script | outcome | why | given |", "|---|---|---|---|"]
    for row in rows:
        given = " ".join(f"{name}={value}" for name, value in row.given.items())
        cells = [cell.replace("|", "\\|") for cell in (row.script, row.kind, row.why, given)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*totals(rows), "", *lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, help="table.md or table.json")
    parser.add_argument("--outside", action="store_true", help="run the scripts from an empty folder")
    parser.add_argument("--run", action="store_true", help="train one step of the built-in model instead of planning")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="scripts below examples that match one of them")
    parser.add_argument("--jobs", type=int, default=2, help="scripts at a time")
    parser.add_argument("--limit", type=float, default=400, help="seconds until a script counts as hanging")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    patterns = arguments.only or (RUN if arguments.run else ("*",))
    scripts = [
        script
        for script in sorted((checkout / "examples").rglob("*.sh"))
        if any(fnmatch(str(script.relative_to(checkout / "examples")), pattern) for pattern in patterns)
    ]
    rows = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for row in pool.map(lambda script: row_of(script, checkout, arguments), scripts):
            rows.append(row)
            print(f"{row.kind:9} {row.script}  {row.why}"[:240], flush=True)
    print("\n".join(totals(rows)))
    if arguments.out:
        as_json = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
        arguments.out.write_text(as_json if arguments.out.suffix == ".json" else markdown(rows))
    return int(any(row.kind in FAULTS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
