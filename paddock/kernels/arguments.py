"""What kernels take beside tensors, whichever device they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

VECTOR = 16
"""Numbers that a CPU's kernels work on at once."""


ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""Numbers by which kernels know a gated MLP's activations."""


def is_odd(vocab_size: int) -> bool:
    """True where a draw reads logits one by one: no 16 divides a row, so no row but the first is aligned."""
    return vocab_size % 16 != 0


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMS norm of every query and of every key, before they are rotated."""

    queries: Tensor
    keys: Tensor
    eps: float
    unit: bool
    """See `norm.add_norm`."""


@dataclass(frozen=True, eq=False)
class Scores:
    """How a layer scores keys: ``scaling * q.k``, then ``softcap * tanh(score / softcap)`` if one is set."""

    scaling: float
    window: int | None = None
    """A query at position p sees keys at p - window + 1 .. p, or at 0 .. p without a window."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """Scores ``[H]`` that stand beside those of the keys: see models/attention/sinks.py."""


@dataclass(frozen=True)
class Pieces:
    """Rows of the buffers ``[tokens, K, D]`` that hold each sequence's tokens; each field is a column ``[rows]``."""

    prompt: Tensor
    """int32: the first token of its prompt."""
    prompt_length: Tensor
    """int32"""
    answer: Tensor
    """int32: the first token of its answer."""
    length: Tensor
    """int64: tokens before the query, which lies behind them and is seen as well."""
    by_prompt: Tensor | None = None
    """int32 ``[3, rows]``: the rows in an order in which those with one prompt are neighbours, and for each place in it
    the first place with the same prompt and the one behind the last. A kernel that reads it may read a prompt once for
    several rows; None: each row reads its own."""

    def followed_by(self, other: Pieces) -> Pieces:
        both = ((self.prompt, other.prompt), (self.prompt_length, other.prompt_length), (self.answer, other.answer),
                (self.length, other.length))  # fmt: skip
        return Pieces(*(torch.cat(pair) for pair in both))


class PromptGroups:
    """Sequences of a stream, each attending to itself, causally. Those of a group also see its first one, the prompt.

    Each of the first `end` tokens of the stream belongs to exactly one sequence.
    """

    def __init__(self, groups: Sequence[Sequence[slice]]):
        members = [member for group in groups for member in group]
        self.sequences = torch.tensor([(member.start, member.stop - member.start) for member in members])
        self.ends = torch.tensor([0, *accumulate(map(len, groups))])
        self.end = max(member.stop for member in members)
        lengths = [[member.stop - member.start for member in group] for group in groups]
        self.most_keys = max(first + max(others, default=0) for first, *others in lengths)

    def layout(self, q: Tensor, k: Tensor) -> tuple[Tensor | int, ...]:
        """Returns the arguments of a kernel: the sequences, and the shapes of q ``[T, H, D]`` and k ``[T, K, D]``."""
        keys, wide = k.shape[1], -(-self.most_keys // VECTOR) * VECTOR
        return self.sequences, self.ends, len(self.ends) - 1, keys, q.shape[1] // keys, q.shape[2], wide


class Stretch(NamedTuple):
    """Names neighbouring tokens of a stream that are copied together."""

    start: int
    """The first of them, in the stream."""
    length: int
    copies: Sequence[int]
    """Where each of their copies begins, among all copies."""


@dataclass(frozen=True)
class Draws:
    """What a draw reads and changes; a row each."""

    numbers: Tensor
    """float64 [rows, width]: one number in (0, 1) for each draw."""
    tokens: Tensor
    """int64 [rows, width]"""
    log_probs: Tensor
    """float32 [rows, width]"""
    token: Tensor
    """int64 [rows]: the last one drawn."""
    drawn: Tensor
    """int64 [rows]: tokens drawn so far."""
    done: Tensor
    """bool [rows]"""
    limit: Tensor
    """int64 [rows]: tokens after which a sequence ends."""
    stops: Tensor
    """int64 [any]: tokens that end a sequence."""
