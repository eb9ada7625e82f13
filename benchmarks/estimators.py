"""Seconds each advantage estimator takes on one core: ``python benchmarks/estimators.py --rows 8192 --tokens 2048``."""

from __future__ import annotations

import argparse
import time

import torch

from paddock.algorithms.advantages import ESTIMATOR, compute_advantages
from paddock.config.schema import AlgorithmConfig
from paddock.core.batch import Batch


def make_batch(rows: int, tokens: int, group_size: int) -> Batch:
    """Responses of random length with a tool's answer in the middle, a score at the end and a KL penalty throughout."""
    torch.manual_seed(0)
    lengths = torch.randint(tokens // 4, tokens + 1, (rows, 1))
    columns = torch.arange(tokens)
    observed = (columns >= lengths // 3) & (columns < lengths // 2)
    mask = ((columns < lengths) & ~observed).float()
    score = (torch.rand(rows) < 0.4).float()
    rewards = torch.randn(rows, tokens).mul_(0.01).mul_(mask).scatter_add_(1, lengths - 1, score[:, None])
    return Batch(
        row=torch.arange(rows),
        group=torch.arange(rows) // group_size,
        prompts=torch.zeros(rows, 1, dtype=torch.long),
        mask=mask,
        rewards=rewards,
        values=torch.randn(rows, tokens),
        old_log_probs=torch.rand(rows, tokens).log_(),
        sum_pi_squared=torch.rand(rows, tokens),
        baseline_scores=torch.rand(rows),
        extras={"accuracy": score.tolist(), "format": torch.rand(rows).tolist()},
    )


def seconds(name: str, batch: Batch, repeats: int) -> float:
    """The quickest of a few runs: the one least disturbed by what else the machine does."""
    config = AlgorithmConfig(adv_estimator=name, gamma=0.99, lam=0.95, gdpo_reward_keys=["accuracy", "format"])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        compute_advantages(batch, config)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(args.rows, args.tokens, args.group_size)
    print(f"{args.rows} rows x {args.tokens} tokens, groups of {args.group_size}, one core, best of {args.repeats}")
    for name in ESTIMATOR.names():
        print(f"{name:32s} {seconds(name, batch, args.repeats):6.3f} s", flush=True)


if __name__ == "__main__":
    main()
