"""Shares of equal work: which sequences go to which rank, and which together through the model."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from paddock.errors import UserError


def workload(seq_len: int) -> int:
    """Cost of one sequence: ``24576 s + s^2``, the linear layers of a mid-sized model and its attention."""
    return 24576 * seq_len + seq_len * seq_len


@dataclass
class Share:
    work: int = 0
    items: list[int] = field(default_factory=list)

    def __add__(self, other: Share) -> Share:
        longer, shorter = (self, other) if len(self.items) >= len(other.items) else (other, self)
        longer.items.extend(shorter.items)
        return Share(self.work + other.work, longer.items)


def karmarkar_karp(workloads: Sequence[int], k: int, equal_size: bool) -> list[list[int]]:
    """Splits item indices into k parts of similar total: the largest differencing method.

    A state is k shares, lightest first. It starts as one item and k-1 empty shares, or as k neighbours in sorted order
    when all parts must hold the same number of items. The two states of largest spread are joined, heaviest share with
    lightest, until one is left.
    """
    ascending = sorted(range(len(workloads)), key=lambda i: (workloads[i], i))
    if equal_size:
        if len(ascending) % k:
            raise ValueError(f"{len(ascending)} items do not make {k} parts of equal size")
        runs = [ascending[i : i + k] for i in range(0, len(ascending), k)]
        states = [[Share(workloads[i], [i]) for i in run] for run in runs]
    else:
        states = [[*(Share() for _ in range(k - 1)), Share(workloads[i], [i])] for i in ascending]
    arrival = itertools.count()
    heap = [(state[0].work - state[-1].work, next(arrival), state) for state in states]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        joined = sorted((a + b for a, b in zip(first, reversed(second), strict=True)), key=lambda share: share.work)
        heapq.heappush(heap, (joined[0].work - joined[-1].work, next(arrival), joined))
    shares = heap[0][-1] if heap else [Share() for _ in range(k)]
    return [sorted(share.items) for share in shares]


def balanced_order(lengths: Sequence[int], k: int) -> list[list[int]]:
    """Row indices for k ranks, by workload; as many rows each, or one fewer where k does not divide them."""
    missing = -len(lengths) % k
    works = [workload(length) for length in lengths] + [-1] * missing
    parts = karmarkar_karp(works, k, equal_size=True)  # the fillers sort first, into one run: one a part at most
    return [[i for i in part if i < len(lengths)] for part in parts]


def needed_micro_batches(lengths: Sequence[int], budget: int, key: str = "ppo_max_token_len_per_gpu") -> int:
    """Returns how many micro-batches of at most ``budget`` tokens hold these sequences. Any larger number does, too."""
    return len(pack(lengths, budget, key))


def token_budget_micro_batches(
    lengths: Sequence[int], budget: int, key: str = "ppo_max_token_len_per_gpu", count: int | None = None
) -> list[list[int]]:
    """Returns index lists within the token budget, of similar work: as few as possible, or exactly ``count``.

    ``count`` is at least ``needed_micro_batches``; ranks that must run in step all use the largest any of them needs.
    Lists are empty if rows are too few.
    """
    if count is None:
        count = needed_micro_batches(lengths, budget, key)
    parts = karmarkar_karp([workload(length) for length in lengths], count, equal_size=False)
    if all(sum(lengths[i] for i in part) <= budget for part in parts):
        return parts
    parts = pack(lengths, budget, key)
    if len(parts) > count:
        raise ValueError(f"{count} micro-batches of {budget} tokens do not hold the batch: it needs {len(parts)}")
    while len(parts) < count:
        heaviest = max(parts, key=lambda part: sum(workload(lengths[i]) for i in part) if len(part) > 1 else -1)
        parts.remove(heaviest)
        works = [workload(lengths[i]) for i in heaviest]
        parts += [[heaviest[i] for i in half] for half in karmarkar_karp(works, 2, equal_size=False)]
    return parts


def pack(lengths: Sequence[int], budget: int, key: str) -> list[list[int]]:
    """First-fit decreasing: within 22 % of the fewest bins."""
    if lengths and max(lengths) > budget:
        raise UserError(
            f"one sequence has {max(lengths)} tokens (prompt and response) and fits no micro-batch",
            key=key,
            value=budget,
            fix=f"set {key} to {max(lengths)} or more, or shorten data.max_prompt_length + data.max_response_length",
        )
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = -1
        bins[place].append(i)
        room[place] -= lengths[i]
    return bins
