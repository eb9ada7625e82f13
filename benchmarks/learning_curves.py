"""Train the embedded default with PPO, GRPO and RLOO on several seeds; write what it learnt, and draw it.

    python benchmarks/learning_curves.py [--seeds 1 2 3] [--algorithms ppo grpo rloo] [--steps 80] [--out docs]
                                         [--set key=value ...]

Each run is the commands a user would type, one after another on one thread: `paddock eval` of the model as it ships,
`paddock train`, `paddock eval` of the checkpoint it left. Writes OUT/curves/learning_curves.json after every run, and
OUT/images/learning_curves.svg at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any
from xml.sax.saxutils import escape

import paddock

ROOT = Path(__file__).resolve().parent.parent
ESTIMATOR = {"ppo": "gae", "grpo": "grpo", "rloo": "rloo"}
GREEDY = "val-core/paddock/addition/reward/mean@1"
PHASES = ("gen", "reward", "ref", "values", "adv", "update_critic", "update_actor")
SAMPLED = (
    *("data=builtin:addition/test", "data.max_prompt_length=16", "data.max_response_length=8"),
    *("rollout.dtype=float32", "rollout.val_kwargs.n=4", "rollout.val_kwargs.do_sample=True"),
    "rollout.val_kwargs.temperature=1.0",
)
"""Held-out pairs, 4 samples each at temperature 1."""

Run = dict[str, Any]


def measure(algorithm: str, seed: int, steps: int, folder: Path, *overrides: str) -> Run:
    """One run in this folder: its curve, and held-out accuracy before and after."""
    train = [
        *(f"algorithm.adv_estimator={ESTIMATOR[algorithm]}", f"trainer.seed={seed}"),
        *(f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}", "trainer.resume_mode=disable"),
        *overrides,
    ]
    before = sampled_accuracy("builtin:tiny", seed, folder)
    wall, cpu = time.monotonic(), children_seconds()
    command("train", *train, f"trainer.default_local_dir={folder}")
    wall, cpu = time.monotonic() - wall, children_seconds() - cpu
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if line["step"] > 0]
    return {
        "algorithm": algorithm,
        "seed": seed,
        "command": " ".join(["paddock train", *train]),
        "reward": [line["critic/score/mean"] for line in updates],
        "greedy": {str(line["step"]): line[GREEDY] for line in lines if GREEDY in line},
        "sampled": {"before": before, "after": sampled_accuracy(f"{folder}/global_step_{steps}/actor", seed, folder)},
        "seconds": {
            "command": round(wall, 1),
            "command_cpu": round(cpu, 1),
            "step": round(median(line["timing_s/step"] - line.get("timing_s/testing", 0.0) for line in updates), 4),
            "phases": {
                phase: round(median(line[f"timing_s/{phase}"] for line in updates), 4)
                for phase in PHASES
                if f"timing_s/{phase}" in updates[0]
            },
        },
    }


def sampled_accuracy(model: str, seed: int, folder: Path) -> float:
    command("eval", f"model={model}", *SAMPLED, f"trainer.seed={seed}", f"--json={folder}/accuracy.json")
    found = json.loads((folder / "accuracy.json").read_text())
    return found["sources"]["paddock/addition"]["metrics"]["mean@4"]


def command(*arguments: str) -> None:
    """Runs `paddock ...`; see `run_module`."""
    run_module("paddock.cli", *arguments)


def run_module(module: str, *arguments: str) -> None:
    """Runs a module of this checkout on one thread; what it says is shown only if it fails."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-m", module, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def children_seconds() -> float:
    """Processor time of finished child processes: unlike the clock, it does not see what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def conditions() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "paddock": paddock.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "machine": {"processor": processor, "cores": os.cpu_count(), "threads": 1},
    }


def summary(run: Run) -> str:
    sampled, greedy, seconds = run["sampled"], list(run["greedy"].values()), run["seconds"]
    return (
        f"{run['algorithm']:4s} seed {run['seed']}: sampled {sampled['before']:.1%} -> {sampled['after']:.1%}, "
        f"greedy {greedy[0]:.1%} -> {greedy[-1]:.1%}, {seconds['step']:.2f} s a step, {seconds['command']:.0f} s in all"
    )


# The picture.

NAME = {"ppo": "PPO", "grpo": "GRPO", "rloo": "RLOO"}
COLOUR = {"ppo": "#d1495b", "grpo": "#1f6fb2", "rloo": "#2a9d6f"}
INK, GREY, GRID, PAPER = "#24292f", "#57606a", "#e6e9ed", "#ffffff"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
WIDTH, HEIGHT = 960, 460
TOP, BOTTOM = 116, 400  # of both panels
DOTTED = "1 6"

Point = tuple[float, float]


@dataclass(frozen=True)
class Panel:
    """One pair of axes: steps, or what `unit` names, to the right, a share from 0 to `top` upwards."""

    left: float
    right: float
    steps: int
    title: str
    top: float = 1.0
    unit: str = "step"

    def at(self, step: float, share: float) -> Point:
        across, up = step / self.steps, share / self.top
        return self.left + (self.right - self.left) * across, BOTTOM - (BOTTOM - TOP) * up

    def axes(self) -> list[str]:
        parts = [text(self.left, TOP - 16, self.title, size=14, weight=600)]
        for percent in range(0, round(100 * self.top) + 1, 20 if self.top > 0.5 else 10):
            _, y = self.at(0, percent / 100)
            parts.append(line(self.left, y, self.right, y, GREY if percent == 0 else GRID))
            parts.append(text(self.left - 10, y + 4, f"{percent}%", anchor="end", fill=GREY))
        pieces = 5 if self.steps % 4 and self.steps % 5 == 0 else 4
        for step in range(0, self.steps + 1, max(1, self.steps // pieces)):
            x, y = self.at(step, 0)
            parts += [line(x, y, x, y + 5, GREY), text(x, y + 21, str(step), anchor="middle", fill=GREY)]
        return [*parts, text((self.left + self.right) / 2, BOTTOM + 43, self.unit, anchor="middle", fill=GREY)]

    def band(self, steps: Sequence[float], low: list[float], high: list[float], colour: str) -> str:
        there = [self.at(step, share) for step, share in zip(steps, high, strict=True)]
        back = [self.at(step, share) for step, share in zip(steps, low, strict=True)]
        return f'<polygon points="{points(there + back[::-1])}" fill="{colour}" fill-opacity="0.18"/>'

    def curve(self, steps: Sequence[float], shares: list[float], colour: str, dashes: str = "none") -> str:
        path = points([self.at(step, share) for step, share in zip(steps, shares, strict=True)])
        style = f'stroke="{colour}" stroke-width="2" stroke-linejoin="round" stroke-linecap="round"'
        return f'<polyline points="{path}" fill="none" {style} stroke-dasharray="{dashes}"/>'

    def dots(self, steps: Sequence[float], shares: list[float], colour: str, hollow: bool) -> list[str]:
        return [dot(*self.at(step, share), colour, hollow) for step, share in zip(steps, shares, strict=True)]


def points(path: list[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in path)


def line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" {more}/>'


def dot(x: float, y: float, colour: str, hollow: bool) -> str:
    fill = PAPER if hollow else colour
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2"/>'


def text(
    x: float, y: float, words: str, *, size: int = 12, weight: int = 400, anchor: str = "start", fill: str = INK
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def draw(document: dict[str, Any]) -> str:
    """Left: what the training samples scored. Right: pairs that training never sees. A band spans the seeds."""
    steps, runs = document["steps"], document["runs"]
    shown = {name: found for name in NAME if (found := [run for run in runs if run["algorithm"] == name])}
    seeds = len({run["seed"] for run in runs})
    left = Panel(62, 462, steps, "Reward of the training samples, 5-step means")
    right = Panel(540, 940, steps, "Accuracy on held-out pairs")
    parts = [
        text(20, 34, "Three algorithms learn two-digit addition", size=19, weight=600),
        text(
            20,
            57,
            f"0.5 million parameters, one CPU thread. Mean of {seeds} seeds; bands span them.",
            size=13,
            fill=GREY,
        ),
        *legend(list(shown)),
        *left.axes(),
        *right.axes(),
    ]
    for name, found in shown.items():
        parts += reward_curve(left, found, COLOUR[name])
    for name, found in shown.items():
        parts += held_out(right, found, COLOUR[name])
    return page(parts)


def page(parts: list[str], height: int = HEIGHT) -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    paper = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">'
    return "\n".join([head, paper, *parts, "</svg>", ""])


def legend(names: list[str]) -> list[str]:
    parts = []
    for place, name in enumerate(names):
        x = WIDTH - 6 - 92 * (len(names) - place)
        parts.append(line(x, 30, x + 26, 30, COLOUR[name], 'stroke-width="3" stroke-linecap="round"'))
        parts.append(text(x + 34, 34.5, NAME[name], size=13, weight=600))
    for x, hollow, label in ((WIDTH - 269, False, "greedy"), (WIDTH - 177, True, "sampled, temperature 1")):
        parts += [dot(x, 53, GREY, hollow), text(x + 13, 57, label, fill=GREY)]
    return parts


def reward_curve(panel: Panel, runs: list[Run], colour: str) -> list[str]:
    low, middle, high = over_seeds([smooth(run["reward"]) for run in runs])
    steps = list(range(1, len(middle) + 1))
    return [panel.band(steps, low, high, colour), panel.curve(steps, middle, colour)]


def held_out(panel: Panel, runs: list[Run], colour: str) -> list[str]:
    steps = [int(step) for step in runs[0]["greedy"]]
    low, middle, high = over_seeds([list(run["greedy"].values()) for run in runs])
    ends = [0, panel.steps]
    _, sampled, _ = over_seeds([[run["sampled"]["before"], run["sampled"]["after"]] for run in runs])
    return [
        panel.band(steps, low, high, colour),
        panel.curve(ends, sampled, colour, DOTTED),
        panel.curve(steps, middle, colour),
        *panel.dots(steps, middle, colour, hollow=False),
        *panel.dots(ends, sampled, colour, hollow=True),
    ]


def smooth(values: list[float]) -> list[float]:
    """Means over up to two neighbours on either side: one step is 512 coin flips."""
    return [mean(values[max(0, place - 2) : place + 3]) for place in range(len(values))]


def over_seeds(rows: list[list[float]]) -> tuple[list[float], list[float], list[float]]:
    """Lowest, mean and highest at each place."""
    columns = list(zip(*rows, strict=True))
    return [min(c) for c in columns], [mean(c) for c in columns], [max(c) for c in columns]


def record(
    name: str,
    plural: str,
    kinds: Sequence[str],
    measure: Callable[..., Run],
    summary: Callable[[Run], str],
    draw: Callable[[dict[str, Any]], str],
    *,
    steps: int,
    about: str,
    prepare: Callable[[], dict[str, Any]] = dict,
) -> int:
    """Measures each kind of run on each seed as the command line says; writes OUT/curves/NAME.json after every run, and
    OUT/images/NAME.svg at the end. `prepare` runs before the first one, and returns what the document says of it."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(f"--{plural}", dest="kinds", nargs="+", choices=kinds, default=list(kinds))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further overrides of every run")
    options = parser.parse_args()
    data, picture = (options.out / file for file in (f"curves/{name}.json", f"images/{name}.svg"))
    for file in (data, picture):
        file.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {**conditions(), "steps": options.steps, **prepare(), "runs": []}
    for seed in options.seeds:  # kinds take turns, so that a busy hour of the machine falls on all of them
        for kind in options.kinds:
            with tempfile.TemporaryDirectory() as folder:
                run = measure(kind, seed, options.steps, Path(folder), *options.set)
            document["runs"].append(run)
            data.write_text(json.dumps(document, indent=1) + "\n")
            print(summary(run), flush=True)
    picture.write_text(draw(document))
    print(f"{data}\n{picture}")
    return 0


def main() -> int:
    return record(
        "learning_curves", "algorithms", list(ESTIMATOR), measure, summary, draw, steps=80, about=__doc__ or ""
    )


if __name__ == "__main__":
    sys.exit(main())
