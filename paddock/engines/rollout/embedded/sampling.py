"""From logits to tokens and their log-probs: one uniform number a token, the inverse of the distribution function."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from paddock.core.rng import uniform
from paddock.engines.rollout.base import Sampling
from paddock.errors import UserError

BLOCK = 256  # tokens whose probabilities are summed before the draw goes into a block
LAST = 1.0 - 2.0**-53  # the number before 1: LAST x total < total
CACHE = 1 << 18  # logits worked on at a time on a CPU: they stay in cache, and in memory already mapped


def uniforms(rows: Tensor, steps: Tensor, starts: Tensor, count: int, seed: int) -> Tensor:
    """[B, count] one number in (0, 1) for each token a row may draw, by (seed, step, row, position) alone.

    `steps` and `starts` ``[B]``: the step that draws a row, and the position of the first token that is drawn.
    """
    positions = starts[:, None] + torch.arange(count, device=rows.device)
    return uniform(seed, steps[:, None], rows[:, None], positions)


def sample(
    logits: Tensor, u: Tensor, sampling: Sampling, early: Tensor | None = None, stops: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns a token and its log-prob for each row of logits [B, V], by the row's number u [B].

    The log-prob is that of log-softmax(logits / temperature), before any filter. Temperature 0 takes the likeliest
    token, the first of equals; its log-prob is that of temperature 1. `early` [B]: rows that may not draw `stops`.
    """
    if early is not None and stops is not None:
        return sample_early(logits, u, sampling, early, stops)
    if logits.device.type != "cpu":
        return sample_rows(logits, u, sampling)
    rows = max(1, CACHE // logits.shape[1])
    drawn = [sample_rows(*part, sampling) for part in zip(logits.split(rows), u.split(rows), strict=True)]
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([log_probs for _, log_probs in drawn])


def sample_rows(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    x = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        x = x / sampling.temperature
    probs = x.softmax(-1)
    tokens = likeliest(x) if sampling.temperature == 0.0 else draw(keep(probs, sampling), u)
    return tokens, pick(probs, tokens).log()


def sample_early(logits: Tensor, u: Tensor, sampling: Sampling, early: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
    """Draws without stop tokens in early rows; log-probs are those with them."""
    kept = logits[:, stops]
    logits[:, stops] = kept.masked_fill(early[:, None], -torch.inf)  # a copy of all logits would take longer
    tokens, _ = sample(logits, u, sampling)
    logits[:, stops] = kept
    x = logits.float() / (sampling.temperature or 1.0)
    return tokens, pick(x, tokens) - x.logsumexp(-1)


def filters(sampling: Sampling) -> bool:
    """True if top-k, top-p or min-p can exclude tokens."""
    return sampling.temperature != 0.0 and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)


def require_finite(log_probs: np.ndarray) -> None:
    """Raises unless all of these log-probs are finite. By numpy: torch would wake threads for so little."""
    if not np.isfinite(log_probs).all():
        raise UserError(
            "the policy's logits are not finite: its weights have diverged",
            fix="go back to an earlier checkpoint, with a smaller learning rate or tighter gradient clipping",
        )


def likeliest(x: Tensor) -> Tensor:
    """argmax over the last dimension, by blocks: several times faster than torch's over a large vocabulary on a CPU."""
    blocks = in_blocks(x, -torch.inf)
    block = blocks.amax(-1).argmax(-1)
    return block * blocks.shape[2] + inside(blocks, block).argmax(-1)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Returns the token where the running sum of weights [B, V] first exceeds u x their total, never one of weight 0.

    Sums run in float64, first over blocks, then inside the block chosen: float32 over a whole vocabulary would lose
    rare tokens, and float64 over all of it takes several times as long.
    """
    blocks = in_blocks(weights, 0.0)
    sums = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    block, target = first_above(sums, u)
    high, low = pick(sums, block), pick(sums, (block - 1).clamp_min(0)) * (block > 0)
    share = ((target - low) / (high - low)).clamp_max(LAST)
    token, _ = first_above(inside(blocks, block).cumsum(-1, dtype=torch.float64), share)
    return (block * blocks.shape[2] + token).clamp_max(weights.shape[1] - 1)  # reached by weights that are not numbers


def first_above(sums: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first index of the rising sums [B, N] beyond the target u x total, and the target."""
    target = u * sums[:, -1]  # less than the total, since u <= LAST
    index = torch.searchsorted(sums, target[:, None], right=True)[:, 0]
    return index.clamp_max(sums.shape[1] - 1), target


def in_blocks(x: Tensor, filling: float) -> Tensor:
    """[B, V] as [B, blocks, size]: a view, unless the vocabulary does not divide into blocks of useful size."""
    size = math.gcd(x.shape[1], BLOCK)
    if size < BLOCK // 4:
        size = BLOCK
        x = pad(x, (0, -x.shape[1] % BLOCK), value=filling)
    return x.unflatten(1, (-1, size))


def inside(blocks: Tensor, block: Tensor) -> Tensor:
    return blocks[torch.arange(len(block), device=block.device), block]


def pick(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[:, None])[:, 0]


def keep(probs: Tensor, sampling: Sampling) -> Tensor:
    """Sets probabilities to 0 that top-k, top-p of what it leaves, or min-p drop. Equals stay or go together."""
    size = probs.shape[1]
    top_k = sampling.top_k if 0 < sampling.top_k < size else size
    if sampling.top_p < 1.0 or top_k < size:
        floor = smallest_kept(ordered(probs)[:, -top_k:], sampling.top_p)
        probs = probs.masked_fill(probs < floor, 0.0)
    if sampling.min_p > 0.0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs


def ordered(probs: Tensor) -> Tensor:
    """Sorts in rising order. numpy sorts floats with vector instructions: 30 times faster than torch on a CPU."""
    if probs.device.type == "cpu":
        return torch.from_numpy(np.sort(probs.numpy(), axis=-1))
    return probs.sort(-1).values


def smallest_kept(rising: Tensor, top_p: float) -> Tensor:
    """[B, 1] the least of the fewest probabilities, from the largest down, that hold a share top_p of their sum."""
    if top_p >= 1.0:
        return rising[:, :1]
    falling = rising.flip(-1)
    sums = falling.double().cumsum(-1)
    kept = (sums - falling < top_p * sums[:, -1:]).sum(-1, keepdim=True)
    return falling.gather(1, (kept - 1).clamp_min(0))
