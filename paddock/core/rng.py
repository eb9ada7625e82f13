"""Randomness as a pure function of (seed, step, row, position): no state, no order, the same bits on every device.

The generator is Philox4x32 with ten rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
written in int64 tensor operations. A counter is the four words (0, position, row, step), the key is
the seed and what the number is for.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


class Stream(enum.IntEnum):
    """Uses that must not share numbers, though seed, step, row and position are equal."""

    SAMPLE = 0
    SHUFFLE = 1
    RESAMPLE = 2
    LOSS = 3


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, ...]:
    """Returns four random words for each counter. Words are arrays or tensors of int64 holding 32 bits, unsigned."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two words wraps in int64; its 64 bits are right all the same, and the mask undoes the sign.
        a, b = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x1, x2, x3 = ((b >> 32) & WORD) ^ x1 ^ k0, b & WORD, ((a >> 32) & WORD) ^ x3 ^ k1, a & WORD
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD, (k1 + KEY_STEPS[1]) & WORD
    return x0, x1, x2, x3


def key_of(seed: int, stream: int) -> tuple[int, int]:
    """Returns the two words of the key: 56 bits of the seed count, the stream has 8."""
    return seed & WORD, (seed >> 32) & 0xFFFFFF | stream << 24


def words(seed: int, step: Tensor | int, row: Tensor, position: Tensor | int, stream: int) -> tuple[Tensor, ...]:
    """Returns four random words for each place. Coordinates broadcast against each other and count modulo 2^32."""
    device, key = row.device, key_of(seed, stream)
    parts = [torch.as_tensor(part, dtype=torch.long, device=device) & WORD for part in (0, position, row, step)]
    c0, c1, c2, c3 = torch.broadcast_tensors(*parts)
    if device.type != "cpu":
        return philox((c0, c1, c2, c3), key)
    # numpy begins an operation in a fraction of the time that torch takes, and there are 140 of them
    found = philox((c0.numpy(), c1.numpy(), c2.numpy(), c3.numpy()), key)
    return tuple(torch.from_numpy(np.asarray(part)) for part in found)


def uniform(
    seed: int, step: Tensor | int, row: Tensor, position: Tensor | int = 0, *, stream: Stream = Stream.SAMPLE
) -> Tensor:
    """Returns numbers in (0, 1), in float64: one for each (step, row, position), which broadcast against each other."""
    high, low, *_ = words(seed, step, row, position, stream)
    return to_unit(high, low)


def to_unit(high: Tensor, low: Tensor) -> Tensor:
    """Returns the middles of 2^52 equal cells: exact in float64, never 0 and never 1."""
    return (((high << 20) | (low >> 12)).double() + 0.5) * 2.0**-52


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """A shuffled ``0..n-1`` for one pass over the data."""
    keys = uniform(seed, epoch, torch.arange(n), stream=Stream.SHUFFLE)
    return keys.argsort(stable=True)
