"""Draw the committed runs: reward of the training samples, and accuracy on held-out problems, step by step.

    python -m benchmarks.results.pictures [--curves docs/curves/results] [--out docs/images]

Runs of one experiment that differ by their seed are one line, their mean, inside a band that spans them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.learning_curves import (
    COLOUR,
    DOTTED,
    GREY,
    HEIGHT,
    ROOT,
    WIDTH,
    Panel,
    dot,
    line,
    over_seeds,
    page,
    smooth,
    text,
)
from benchmarks.results.experiment import load
from benchmarks.results.records import METHODS, PASSED

CURVES, IMAGES = ROOT / "docs/curves/results", ROOT / "docs/images"
TOP = 0.5  # of a panel, as a share
LEGEND = 26  # height of the row that names the lines

Run = dict[str, Any]


@dataclass(frozen=True)
class Picture:
    """Shows some experiments, each in its colour."""

    file: str
    title: str
    colours: dict[str, str]
    problems: str = "the 1,319 test problems"
    top: float = TOP
    labels: dict[str, str] = field(default_factory=dict)
    """Experiment -> its name in the picture, if that is not the run's title."""


PICTURES = (
    Picture(
        "results_gsm8k.svg",
        "Three algorithms teach a 0.5B model GSM8K",
        {"ppo-0.5b": COLOUR["ppo"], "grpo-0.5b": COLOUR["grpo"], "rloo-0.5b": COLOUR["rloo"]},
    ),
    Picture(
        "results_gsm8k_kin.svg",
        "GRPO and its kin on GSM8K",
        {
            "grpo-0.5b": COLOUR["grpo"],
            "dr-grpo-0.5b": "#d98324",
            "gspo-0.5b": "#7b4fa6",
            "cispo-0.5b": "#1b998b",
            "reinforce-plus-plus-0.5b": "#c2255c",
            "rloo-no-kl-0.5b": COLOUR["rloo"],
            "dapo-0.5b": "#8a5a2b",
        },
        top=0.6,
    ),
    Picture(
        "results_gsm8k_size.svg",
        "GRPO on GSM8K with two sizes of one model",
        {"grpo-0.5b": COLOUR["grpo"], "grpo-1.5b": "#d98324"},
        top=0.8,
        labels={"grpo-0.5b": "GRPO, 0.5B"},
    ),
    Picture(
        "results_gsm8k_lora.svg",
        "GRPO with adapters",
        {"grpo-0.5b": COLOUR["grpo"], "grpo-lora-0.5b": "#d98324", "grpo-lora-merged-0.5b": "#7b4fa6"},
        labels={"grpo-0.5b": "GRPO, all weights"},
    ),
    Picture(
        "results_gsm8k_small.svg",
        "GRPO on GSM8K with a model of 135M parameters",
        {"grpo-135m": COLOUR["grpo"]},
        top=0.2,
        labels={"grpo-135m": "GRPO after SFT, 135M"},
    ),
    Picture(
        "results_gsm8k_calculator.svg",
        "GRPO with and without a tool",
        {
            "grpo-sft-0.5b": COLOUR["grpo"],
            "grpo-sft-calculator-0.5b": "#d98324",
            "grpo-sft-calculator-text-0.5b": "#1b998b",
        },
    ),
    Picture(
        "results_programs.svg",
        "GRPO on programs that the sandbox judges",
        {"grpo-code-0.5b": COLOUR["grpo"], "grpo-code-1.5b": "#d98324"},
        "HumanEval's 164 problems",
        top=1.0,
    ),
)


def read(folder: Path = CURVES) -> dict[str, list[Run]]:
    """Experiment -> Paddock's runs, by seed. Those of another trainer are compared by comparison.py."""
    found: dict[str, list[Run]] = {}
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text())
        if "curves" in run and "trainer" not in run:
            found.setdefault(run["experiment"], []).append(run)
    return found


def draw(picture: Picture, runs: dict[str, list[Run]]) -> str | None:
    """None if no experiment of the picture has run."""
    shown = {name: runs[name] for name in picture.colours if name in runs}
    if not shown:
        return None
    steps = max(run["steps"] for found in shown.values() for run in found)
    left = Panel(62, 462, steps, "Reward of the training samples, 5-step means", picture.top)
    right = Panel(540, 940, steps, f"Accuracy on {picture.problems}, greedy", picture.top)
    parts = [
        text(20, 34, picture.title, size=19, weight=600),
        text(20, 57, subtitle(shown), size=13, fill=GREY),
        *legend(picture, shown),
        f'<g transform="translate(0 {LEGEND})">',
        *left.axes(),
        *right.axes(),
    ]
    for name, found in shown.items():
        colour = picture.colours[name]
        parts += [*reward(left, found, colour), *held_out(right, found, colour)]
    return page([*parts, "</g>"], HEIGHT + LEGEND)


def subtitle(shown: dict[str, list[Run]]) -> str:
    """Experiments of one picture have the same number of answers a step."""
    loaded = [load(name) for name in shown]
    sizes = ((one.settings["data.train_batch_size"], one.settings["actor_rollout_ref.rollout.n"]) for one in loaded)
    (answers,) = {prompts * samples for prompts, samples in sizes}
    models = " and ".join(dict.fromkeys(one.model.rpartition("/")[2] for one in loaded))
    bands = "; bands span seeds" if any(len(found) > 1 for found in shown.values()) else ""
    kept = "".join(f" ({run['title']}: kept ones)" for run, *_ in shown.values() if "rounds" in run["curves"])
    return f"{models}, one H200, {answers:,} answers a step{kept}{bands}."


def legend(picture: Picture, shown: dict[str, list[Run]]) -> list[str]:
    parts, x = [], 20.0
    for name, found in shown.items():
        label = picture.labels.get(name, found[0]["title"]) + (f", {len(found)} seeds" if len(found) > 1 else "")
        parts.append(line(x, 80, x + 26, 80, picture.colours[name], 'stroke-width="3" stroke-linecap="round"'))
        parts.append(text(x + 34, 84.5, label, size=12, weight=600))
        x += 54 + 7.5 * len(label)
    if len(methods(found[0])) > 1:
        for x, hollow, label in ((WIDTH - 180, False, "strict"), (WIDTH - 88, True, "lenient")):
            parts += [dot(x, 53, GREY, hollow), text(x + 13, 57, label, fill=GREY)]
    return parts


def methods(run: Run) -> list[str]:
    """How the run's answers were counted: strictly and leniently, or as the reward did."""
    return [name for name in (*METHODS, PASSED) if name in run["held_out"]]


def reward(panel: Panel, runs: list[Run], colour: str) -> list[str]:
    low, middle, high = over_seeds(cut([smooth(run["curves"]["reward"]) for run in runs]))
    steps = list(range(1, len(middle) + 1))
    return [panel.band(steps, low, high, colour), panel.curve(steps, middle, colour)]


def held_out(panel: Panel, runs: list[Run], colour: str) -> list[str]:
    first, *others = methods(runs[0])
    low, middle, high = over_seeds(cut([run["held_out"][first] for run in runs]))
    steps = runs[0]["held_out"]["step"][: len(middle)]
    means = [over_seeds(cut([run["held_out"][name] for run in runs]))[1] for name in others]
    return [
        panel.band(steps, low, high, colour),
        *(panel.curve(steps, lenient, colour, DOTTED) for lenient in means),
        panel.curve(steps, middle, colour),
        *(part for lenient in means for part in panel.dots(steps, lenient, colour, hollow=True)),
        *panel.dots(steps, middle, colour, hollow=False),
    ]


def cut(rows: list[list[float]]) -> list[list[float]]:
    """As far as every seed has come."""
    length = min(map(len, rows))
    return [row[:length] for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=Path, default=CURVES)
    parser.add_argument("--out", type=Path, default=IMAGES)
    options = parser.parse_args()
    runs = read(options.curves)
    for picture in PICTURES:
        if drawn := draw(picture, runs):
            (options.out / picture.file).write_text(drawn)
            print(options.out / picture.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
