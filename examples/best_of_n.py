"""Best-of-n distillation: of n answers to a prompt the best one is learnt, as if a teacher had written it.

    python examples/best_of_n.py

The policy is its own teacher. An advantage of 1 on every token makes the policy-gradient loss the mean of -log pi.
"""

from __future__ import annotations

import torch

import paddock


def best_rows(batch: paddock.Batch) -> torch.Tensor:
    """Returns, for each prompt, the position of its best answer; none if all its answers score alike."""
    scores, best = batch.need("scores").sum(-1), []
    for group in batch.group.unique():
        rows = (batch.group == group).nonzero()[:, 0]
        if scores[rows].max() > scores[rows].min():
            best.append(int(rows[scores[rows].argmax()]))
    return torch.tensor(best, dtype=torch.long)


def distil(run: paddock.Run, steps: int, n: int = 8) -> list[float]:
    """Returns the mean score of each step's answers."""
    means = []
    for _ in range(steps):
        batch = run.score(run.sample(n=n))
        best = batch.rows(best_rows(batch))
        run.learn(best.with_(advantages=best.need("mask").float()))
        means.append(float(batch.need("scores").sum(-1).mean()))
        print(f"{len(means):3d}  {means[-1]:.3f}")
    return means


if __name__ == "__main__":
    with paddock.Run(batch=64, steps=12, logger=["file"]) as run:  # the built-in model and task: addition
        means = distil(run, steps=12)
