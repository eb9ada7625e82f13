"""Steps an hour with rollouts that run ahead, beside none and beside as many mini-batches of one rollout.

python benchmarks/ahead.py                                           # a small model on a CPU, in some minutes
python benchmarks/ahead.py --shape smollm2-135m --prompts 32 --limit 4096 --device cuda
python benchmarks/ahead.py --shape qwen2.5-1.5b --prompts 32 --limit 4096 --device cuda --staleness 0 2 --tail 8
python benchmarks/ahead.py --staleness 0 1 --minis --set actor_rollout_ref.hybrid_engine=False   # two pools

Lengths are drawn: log-normal, the 99th percentile `--tail` times the median, half of the variance the prompt's, cut at
`--limit`; the p99 is the limit divided by 1.5. Everything else is a run as `paddock train` makes it: real rollouts,
rewards, updates, on random weights. `mini-batches k` is a run whose rollouts are k + 1 times as large and take k + 1
optimizer steps with the rollout's own log-probs, in the same number of slots. Means are over whole periods of k + 1.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `paddock train` does

import gpu_step
import torch
from cpu_step import build_model, write_prompts
from step_work import Work

from paddock.core.device import synchronize
from paddock.rollouts.episode import Episode
from paddock.trainer.lifecycle import Listeners
from paddock.trainer.reinforcement import REINFORCEMENT
from paddock.trainer.run import open_training

COLUMNS = ("run", "s a step", "x", "gen s", "update s", "worst age", "mean age", "ess", "tokens a step")


@dataclass(frozen=True)
class Tail:
    """Lengths of responses: log-normal, a share of the variance the prompt's."""

    limit: int
    ratio: float
    """99th percentile, divided by the median."""

    def length(self, group: int, row: int) -> int:
        sigma = math.log(self.ratio) / NormalDist().inv_cdf(0.99)
        median = self.limit / 1.5 / self.ratio
        z = (random.Random(f"group {group}").gauss() + random.Random(f"row {row}").gauss()) / math.sqrt(2)
        return max(1, min(self.limit, round(median * math.exp(sigma * z))))

    def cut(self, episode: Episode) -> Episode:
        """Returns the episode with its own limit of tokens."""
        most = self.length(episode.group, episode.id)
        return episode if episode.spans else replace(episode, prompt=replace(episode.prompt, max_tokens=most))


def drawn(tail: Tail, go_on: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a rollout whose responses have drawn lengths."""
    return lambda asked, *others: go_on([tail.cut(episode) for episode in asked], *others)


def measure(args: argparse.Namespace, work: Work, batches: int, staleness: int, minis: bool) -> list[str]:
    """Runs `batches` batches behind a first period; returns a row of the table."""
    period, slots = staleness + 1, round(args.slots * work.prompts * work.n)
    keys = [f"actor_rollout_ref.rollout.max_num_seqs={slots}", f"algorithm.staleness={0 if minis else staleness}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={work.prompts}", "trainer.test_freq=-1",
            "trainer.val_before_train=False", f"trainer.total_training_steps={1000}", "trainer.total_epochs=1000",
            f"actor_rollout_ref.actor.optim.lr={args.lr}", *args.set]  # fmt: skip
    if minis:
        keys += [f"data.train_batch_size={period * work.prompts}", "algorithm.rollout_correction.bypass_mode=True"]
    config = gpu_step.config_of(work, args.device, extra=keys)
    steps = batches // period if minis else batches
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as things:
        config.trainer.default_local_dir = folder
        config.trainer.save_last = False
        training = things.enter_context(open_training(config, REINFORCEMENT, {}, Listeners()))
        rollout = training.opened().roles.rollout
        for name in ("go_on", "run_on"):
            setattr(rollout, name, drawn(Tail(args.limit, args.tail), getattr(rollout, name)))
        for _ in range(1 if minis else period):
            training.advance()
        synchronize(torch.device(args.device))
        begun = time.perf_counter()
        for _ in range(steps):
            step = training.advance()
            assert step is not None
            rows.append(step.metrics)
        synchronize(torch.device(args.device))
        seconds = (time.perf_counter() - begun) / steps / (period if minis else 1)
    share = period if minis else 1
    name = f"mini-batches {staleness}" if minis else f"staleness {staleness}"
    off = "training/off_policy/"
    worst = [row.get(f"{off}trajectory_staleness_worst/{kind}", math.nan) for row in rows for kind in ("max", "mean")]
    means = [fmean(row.get(key, math.nan) for row in rows) for key in ("timing_s/gen", "timing_s/update_actor")]
    tokens = fmean(row["response_length/mean"] for row in rows) * work.prompts * work.n
    return [name, seconds, *[value / share for value in means], max(worst[::2]), fmean(worst[1::2]),
            fmean(row.get(f"{off}ess", math.nan) for row in rows), tokens]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", choices=[*gpu_step.SHAPES, "tiny"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--limit", type=int, default=512, help="most tokens of a response")
    parser.add_argument("--tail", type=float, default=8.0, help="99th percentile of lengths, divided by the median")
    parser.add_argument("--slots", type=float, default=1.25, help="responses in flight, in batches")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minis", type=int, nargs="*", default=[2], help="mini-batches beside a staleness of so many")
    parser.add_argument("--periods", type=int, default=8, help="whole periods of k + 1 batches that are measured")
    parser.add_argument("--weights", default="fp32" if not torch.cuda.is_available() else "bf16")
    parser.add_argument("--lr", default="1e-6")
    parser.add_argument("--set", nargs="*", default=[], help="further keys")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        case = gpu_step.CASES["tiny"] if args.shape == "tiny" else gpu_step.SHAPES[args.shape]
        case = replace(case, prompts=args.prompts)
        build_model(case, folder / "model", torch.device(args.device))
        longest = write_prompts(case, folder / "model", 64 * case.prompts, folder / "prompts.jsonl")
        work = Work(
            str(folder / "model"), str(folder / "prompts.jsonl"), case.prompts, case.n, longest, args.limit, 0, 0,
            args.weights, case.micro_rows, False, name, [],
        )  # fmt: skip
        print(f"{args.shape} on {args.device}: {case.prompts} x {case.n} responses, p99 {args.tail:g} x the median, "
              f"limit {args.limit}, {args.slots:g} batches in flight")  # fmt: skip
        print(" | ".join(COLUMNS), flush=True)
        first = None
        runs = [(k, False) for k in args.staleness] + [(k, True) for k in args.minis]
        for staleness, minis in runs:
            row = measure(args, work, args.periods * (staleness + 1), staleness, minis)
            first = first or row[1]
            numbers = [f"{row[1]:.3f}", f"{first / row[1]:.2f}", *(f"{value:.3g}" for value in row[2:-1])]
            print(" | ".join([str(row[0]), *numbers, f"{row[-1]:,.0f}"]), flush=True)


if __name__ == "__main__":
    main()
