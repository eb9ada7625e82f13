"""Run folders with known content: as many steps and metrics as a real run has, without the training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from paddock.config import tree
from paddock.loading.load import load

VALIDATION = "val-core/openai/gsm8k/acc/mean@1"
PASS = "val-aux/openai/gsm8k/acc/pass@1"


def metrics_of(step: int, dice: random.Random, further: int = 50) -> dict[str, Any]:
    """Returns a line with the metrics that the page draws, and `further` others."""
    return {
        "step": step,
        "critic/score/mean": 1 - math.exp(-step / 300) + dice.gauss(0, 0.02),
        "response_length/mean": 200 + step / 10 + dice.gauss(0, 5),
        "actor/entropy": math.exp(-step / 500),
        "actor/kl_loss": step / 5000,
        "actor/grad_norm": abs(dice.gauss(1, 0.3)),
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 1.0,
        "timing_s/step": 3.25,
        "perf/time_per_step": 3.25,
        "perf/total_num_tokens": 6500.0,
        **{f"rollout_corr/number_{i}": dice.gauss(0, 1) for i in range(further)},
    }


def held_ahead(step: int) -> dict[str, Any]:
    """Returns what a run with staleness 1 logs in a step: every other one draws two batches."""
    odd = step % 2
    age = "training/off_policy/token_staleness_share/"
    waiting = {"rollout/window/ready": 60.0 * odd, "rollout/window/carried_rows": 4.0}
    return {f"{age}0": 1.0 * odd, f"{age}1": 1.0 - odd, "timing_s/gen": 2.0 * odd, **waiting}


def write_run(
    folder: Path,
    steps: int = 20,
    seed: int = 0,
    samples: bool = True,
    settings: tuple[str, ...] | None = (),
    ahead: bool = False,
) -> list[dict[str, Any]]:
    """Writes a run folder and returns its metrics; `settings` None leaves out run.json, as in older folders."""
    folder.mkdir(parents=True)
    dice = random.Random(seed)
    lines = [{"step": 0, VALIDATION: 0.25, PASS: 0.25}]
    for step in range(1, steps + 1):
        lines.append(metrics_of(step, dice) | (held_ahead(step) if ahead else {}))
        if step % 10 == 0:
            lines[-1] |= dict.fromkeys((VALIDATION, PASS), 0.25 + 0.5 * step / steps)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if samples:
        write_samples(folder, [0, 10, steps])
    if settings is not None:
        write_start(folder, settings, seed)
    return lines


def write_start(folder: Path, settings: tuple[str, ...], seed: int) -> None:
    loaded = load([f"trainer.default_local_dir={folder}", f"trainer.seed={seed}", *settings])
    start = {
        "after_step": 0,
        "command": "train",
        "settings": {key: tree.get(loaded.config, key) for key in tree.leaves()},
        "origins": loaded.origins,
        "environment": {"paddock": "0.1", "device": "1 x cpu"},
    }
    (folder / "run.json").write_text(json.dumps({"starts": [start]}))


def write_samples(folder: Path, steps: list[int], answer: str = "The answer is {}.") -> None:
    lines = []
    for source in ("validation", "rollout"):
        for step in steps:
            rows = [
                {"prompt": f"What is {n} + {n}?", "answer": answer.format(2 * n + (step == 0)), "length": 8,
                 "score": float(step > 0), "group": n, "data_source": "openai/gsm8k", "ground_truth": str(2 * n),
                 "advantage": 0.5, "extras": {"acc": step > 0}}
                for n in range(6)
            ]  # fmt: skip
            lines.append({"step": step, "source": source, "samples": rows})
    lines.sort(key=lambda line: line["step"])
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
