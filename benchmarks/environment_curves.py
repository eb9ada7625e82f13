"""Train the embedded models in the built-in environments on several seeds; write what they learnt, and draw it.

    python -m benchmarks.environment_curves [--seeds 1 2 3] [--tasks tool no_tool guess] [--steps 80] [--out docs]
                                            [--set key=value ...]

Products of two numbers with a tool that multiplies and without it, from the same weights; and a game of guessing a
digit. Each run is the command a user would type, on one thread. Writes OUT/curves/environments.json after every run,
and OUT/images/environments.svg at the end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.learning_curves import (
    GREY,
    Panel,
    children_seconds,
    command,
    line,
    over_seeds,
    page,
    record,
    reward_curve,
    text,
)

WITHOUT = ("actor_rollout_ref.model.path=builtin:tiny-tools", "data.train_files=builtin:products/train",
           "data.val_files=builtin:products/test", "trainer.device=cpu", "data.train_batch_size=32",
           "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=5e-4", "data.max_prompt_length=16",
           "data.max_response_length=40", "actor_rollout_ref.rollout.dtype=float32",
           "actor_rollout_ref.model.enable_gradient_checkpointing=False")  # fmt: skip
TASKS: dict[str, tuple[str, ...]] = {
    "tool": ("environment=builtin:calculator",),
    "no_tool": WITHOUT,
    "guess": ("environment=builtin:guess",),
}
"""Overrides of `paddock train`; the embedded default has the rest."""
BEST = 0.81
"""Mean reward of who halves what is left, in the game."""
NAME = {"tool": "with the tool", "no_tool": "without it", "guess": "guessing a digit"}
COLOUR = {"tool": "#1f6fb2", "no_tool": "#d1495b", "guess": "#2a9d6f"}

Run = dict[str, Any]


def measure(task: str, seed: int, steps: int, folder: Path, *overrides: str) -> Run:
    """One run in this folder: the reward of its samples, and that of greedy episodes on held-out rows."""
    train = [
        "algorithm.adv_estimator=grpo", *TASKS[task], f"trainer.seed={seed}", f"trainer.total_training_steps={steps}",
        "trainer.test_freq=10", "trainer.val_before_train=True", "trainer.resume_mode=disable", *overrides,
    ]  # fmt: skip
    wall, cpu = time.monotonic(), children_seconds()
    command("train", *train, f"trainer.default_local_dir={folder}")
    wall, cpu = time.monotonic() - wall, children_seconds() - cpu
    lines = [json.loads(one) for one in (folder / "metrics.jsonl").read_text().splitlines()]
    updates = [one for one in lines if one["step"] > 0]
    name = next(key for one in lines for key in one if key.startswith("val-core/"))
    told = {
        key: [one[key] for one in updates] for key in ("num_turns/mean", "tool_call_counts/mean") if key in updates[0]
    }
    return {
        "task": task,
        "seed": seed,
        "command": " ".join(["paddock train", *train]),
        "reward": [one["critic/score/mean"] for one in updates],
        "greedy": {str(one["step"]): one[name] for one in lines if name in one},
        **told,
        "seconds": {
            "command": round(wall, 1),
            "command_cpu": round(cpu, 1),
            "step": round(median(one["timing_s/step"] for one in updates), 4),
        },
    }


def summary(run: Run) -> str:
    greedy, seconds = list(run["greedy"].values()), run["seconds"]
    return (
        f"{run['task']:8s} seed {run['seed']}: sampled {run['reward'][0]:.3f} -> {run['reward'][-1]:.3f}, greedy "
        f"{greedy[0]:.3f} -> {greedy[-1]:.3f}, {seconds['step']:.2f} s a step, {seconds['command_cpu']:.0f} s of CPU"
    )


def draw(document: dict[str, Any]) -> str:
    """Left: products with and without the tool. Right: the game. A band spans the seeds."""
    steps, runs = document["steps"], document["runs"]
    seeds = len({run["seed"] for run in runs})
    panels = {
        "tool": Panel(62, 462, steps, "Products: held-out accuracy (dots), reward (line)"),
        "guess": Panel(540, 940, steps, "The game: reward, greedy (dots), sampled (line)"),
    }
    panels["no_tool"] = panels["tool"]
    about = f"0.5 million parameters, GRPO, one CPU thread. Mean of {seeds} seeds; bands span them."
    parts = [
        text(20, 34, "Tools and many turns, learnt in minutes on a CPU", size=19, weight=600),
        text(20, 57, about, size=13, fill=GREY),
        *panels["tool"].axes(),
        *panels["guess"].axes(),
    ]
    for x, name in zip((595, 715, 815), NAME, strict=True):
        parts.append(line(x, 53, x + 20, 53, COLOUR[name], 'stroke-width="3" stroke-linecap="round"'))
        parts.append(text(x + 26, 57, NAME[name], size=12, weight=600))
    left, high = panels["guess"].at(0, BEST)
    parts.append(line(left, high, panels["guess"].right, high, GREY, 'stroke-dasharray="4 4"'))
    parts.append(text(left + 8, high - 6, f"halving what is left: {BEST}", fill=GREY))
    for name, panel in panels.items():
        own = [run for run in runs if run["task"] == name]
        if own:
            places = [int(step) for step in own[0]["greedy"]]
            _, middle, _ = over_seeds([list(run["greedy"].values()) for run in own])
            parts += [*reward_curve(panel, own, COLOUR[name]), *panel.dots(places, middle, COLOUR[name], hollow=False)]
    return page(parts)


def main() -> int:
    return record("environments", "tasks", list(TASKS), measure, summary, draw, steps=80, about=__doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
