"""An order of prompts in which each of several files has a share of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paddock.core.rng import permutation
from paddock.errors import UserError


class Mixture:
    """The order of an epoch, as a function of (seed, epoch).

    An epoch draws as many prompts as there are rows, of which each file gives its share by weight, rounded so that the
    sum is right. Shares hold at every place of the order: among its first t prompts a file has its share of t, to
    within one prompt for two files. Each file is walked pass by pass: a row comes again when all others of its file
    have come as often, also over the end of an epoch.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool):
        self.sizes, self.weights, self.seed, self.shuffle = list(sizes), list(weights), seed, shuffle
        if 0 in self.sizes:
            reason = f"number {self.sizes.index(0) + 1} of data.train_files gives no prompt, and has a weight"
            raise UserError(reason, key="data.max_prompt_length", fix="raise it, or leave the file out")
        self.starts = np.cumsum([0, *sizes])
        self.shares = shares(sum(sizes), weights)

    def __call__(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns positions of rows, and for each draw which pass over its file it belongs to."""
        drawn = [self._draws(number, epoch) for number in range(len(self.sizes))]
        when = np.concatenate([(np.arange(share) + 0.5) / share for share in self.shares if share])
        order = np.argsort(when, kind="stable")
        positions, passes = (np.concatenate([draws[i] for draws in drawn]) for i in (0, 1))
        return positions[order], passes[order]

    def _draws(self, number: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns what one file gives to this epoch: it goes on where the epoch before left it."""
        size, share = self.sizes[number], self.shares[number]
        places = np.arange(epoch * share, (epoch + 1) * share)
        passes = places // size
        rows = places % size
        for again in np.unique(passes) if self.shuffle else ():
            chosen = passes == again
            rows[chosen] = permutation(size, self.seed + 7919 * number, int(again)).numpy()[rows[chosen]]
        return rows + self.starts[number], passes


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divides `total` in proportion to the weights, in whole numbers: what is left over goes to the largest parts of
    one that were cut off."""
    exact = np.asarray(weights, dtype=np.float64) * (total / sum(weights))
    whole = np.floor(exact).astype(np.int64)
    for number in np.argsort(whole - exact, kind="stable")[: total - int(whole.sum())]:
        whole[number] += 1
    return [int(share) for share in whole]
