"""What `paddock plan` says of every script in examples/, written into their headers and the tables of the READMEs.

    python tools/example_headers.py          # after a change of a script, of the plan's memory or of its time

A script's `# hardware:` line is what it was written for; `# memory:` and `# time:` follow from it. The time of a CPU is
not planned: that line is left as it is.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddock.loading.load import load
from paddock.plan.plan import make
from paddock.plan.report import as_json
from paddock.plan.tables import clock

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("grpo_trainer", "ppo_trainer", "rloo_trainer", "sandbox", "environments", "distillation")
SEVERAL_COMMANDS = ("run_tiny_rm.sh", "run_tiny.sh")
"""Not one run of one config: nothing to plan."""
HARDWARE = re.compile(r"^# hardware: +(\d+) nodes? x (\d+) (\S+) \((\d+) GiB each\)$", re.M)
GIB = 1024**3
READMES = ("README.md", "README_zh.md")
TABLE = re.compile(r"(<!-- scripts of (\w+) -->\n).*?(<!-- end -->)", re.S)


@dataclass(frozen=True)
class Hardware:
    nodes: int
    per_node: int
    device: str
    gib: int


def scripts() -> list[Path]:
    found = (file for folder in FOLDERS for file in sorted((ROOT / "examples" / folder).glob("*.sh")))
    return [file for file in found if file.name not in SEVERAL_COMMANDS]


def hardware(script: Path) -> Hardware | None:
    """None: a CPU."""
    found = HARDWARE.search(script.read_text())
    return found and Hardware(int(found[1]), int(found[2]), found[3], int(found[4]))


def header(script: Path, name: str) -> str:
    found = re.search(rf"^# {name}: +(.+)$", script.read_text(), re.M)
    return found[1] if found else ""


def arguments(script: Path, *more: str) -> list[str]:
    """What the script hands to `python3 -m paddock.trainer.main_ppo`, with a home that holds no data of its own."""
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "python3"
        listing.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        listing.chmod(0o755)
        env = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": "/home/paddock"}
        done = subprocess.run(["bash", str(script), *more], env=env, capture_output=True, text=True, check=True)
    module, name, *rest = done.stdout.splitlines()
    assert (module, name) == ("-m", "paddock.trainer.main_ppo"), script
    return rest


def plan_of(script: Path) -> dict[str, Any]:
    target = hardware(script)
    gpu = target and target.device
    return as_json(make(load(arguments(script), gpu=gpu), gpu))


def memory_line(plan: dict[str, Any]) -> str:
    """The fullest phase of a device, and what a node's host holds for its devices."""
    memory = plan["memory"]
    peak = max(sum(parts.values()) for parts in memory["phases"].values()) / GIB
    if plan["config"]["trainer"]["device"] == "cpu":
        return f"{peak:.0f} GiB of RAM (paddock plan)" if peak >= 1 else "under 1 GiB of RAM (paddock plan)"
    each = f"{peak:.0f} GiB of {memory['per_device_bytes'] / GIB:.0f} GiB a device"
    host = f", {memory['host_bytes'] / GIB:.0f} GiB of each host" if memory["host_bytes"] >= GIB else ""
    fits = "" if memory["fits"] else ": too full if every row is long"
    return f"{each}{host} (paddock plan{fits})"


def time_line(plan: dict[str, Any]) -> str | None:
    seconds, steps = plan["seconds"], plan["batch"]["total_steps"]
    if seconds is None or plan["config"]["trainer"]["device"] == "cpu":  # a time of the processor at hand
        return None
    whole = f", {clock(steps * seconds['step'])} for {steps} steps" if steps else ""
    return f"about {clock(seconds['step'])} a step{whole} (paddock plan, every response of full length)"


def rewritten(text: str, plan: dict[str, Any]) -> str:
    for name, line in (("memory", memory_line(plan)), ("time", time_line(plan))):
        if line is not None:
            text = re.sub(rf"^# {name}:( +).*$", rf"# {name}:\g<1>{line}", text, count=1, flags=re.M)
    return text


def row(script: Path) -> str:
    memory = header(script, "memory").split(" (paddock plan")[0].replace(" a device", "")
    step = header(script, "time").split(" a step")[0].removeprefix("about ")
    target = hardware(script)
    machine = f"{target.nodes * target.per_node} x {target.device}" if target else "CPU"
    return f"| [`{script.name}`]({script.parent.name}/{script.name}) | {machine} | {memory} | {step} |"


def tables(text: str) -> str:
    """Between its two marks, the rows of a folder; the heading is the page's own."""

    def table(found: re.Match[str]) -> str:
        kept = "".join(line + "\n" for line in found[0].splitlines()[1:3])
        rows = "".join(row(script) + "\n" for script in scripts() if script.parent.name == found[2])
        return f"{found[1]}{kept}{rows}{found[3]}"

    return TABLE.sub(table, text)


def main() -> None:
    for script in scripts():
        script.write_text(rewritten(script.read_text(), plan_of(script)))
    for name in READMES:
        page = ROOT / "examples" / name
        page.write_text(tables(page.read_text()))


if __name__ == "__main__":
    main()
