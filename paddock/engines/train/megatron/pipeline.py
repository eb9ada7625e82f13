"""The schedule 1F1B: each stage of a pipeline keeps as many micro-batches in flight as stages follow it.

The last stage yields what a forward gave there, and goes on when the caller has its loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Y = TypeVar("Y")
Run = Generator[Y, None, Tensor]
"""Yields on the last stage what its forward gave; returns the states, or on the last stage the share of the loss."""
Forward = Callable[[int, Tensor | None], Run[Y]]
"""(micro-batch, states of the stage before) -> a run of this stage's layers."""
Flying = deque[tuple[int, Tensor | None, Tensor]]
"""Micro-batches between their forward and their backward: number, states that came in, states or share of the loss."""


class Pipeline:
    """Knows the stages before and after this one. `shapes` are those of the states between stages, by micro-batch."""

    def __init__(self, ranks: dist.ProcessGroup, device: torch.device, dtype: torch.dtype):
        self.stage, self.stages, self.ranks = ranks.rank(), ranks.size(), ranks
        self.device, self.dtype = device, dtype
        self.before = None if self.stage == 0 else dist.get_global_rank(ranks, self.stage - 1)
        self.after = None if self.stage == self.stages - 1 else dist.get_global_rank(ranks, self.stage + 1)

    def exchange(
        self, send: Tensor | None, to: int | None, shape: tuple[int, ...] | None, source: int | None
    ) -> Tensor | None:
        """Sends and receives at once: a stage that only sends and one that only receives would wait for each other."""
        ops, room = [], None
        if to is not None and send is not None:
            ops.append(dist.P2POp(dist.isend, send.contiguous(), to, group=self.ranks))
        if source is not None and shape is not None:
            room = torch.empty(shape, dtype=self.dtype, device=self.device)
            ops.append(dist.P2POp(dist.irecv, room, source, group=self.ranks))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return room

    def forward(self, shapes: Sequence[tuple[int, ...]], step: Forward[Y]) -> Iterator[Y]:
        """Runs the forward of every micro-batch, without gradients."""
        for number, shape in enumerate(shapes):
            states = yield from step(number, self.exchange(None, None, shape, self.before))
            self.exchange(states, self.after, None, None)

    def train(self, shapes: Sequence[tuple[int, ...]], step: Forward[Y]) -> Iterator[Y]:
        """Runs forward and backward of every micro-batch."""
        count = len(shapes)
        early = min(self.stages - self.stage - 1, count)
        flying: Flying = deque()
        for number in range(early):
            states = self.exchange(None, None, shapes[number], self.before)
            found = yield from self.run(number, states, step, flying)
            self.exchange(found, self.after, None, None)
        states = self.exchange(None, None, shapes[early], self.before) if early < count else None
        for number in range(early, count):
            found = yield from self.run(number, states, step, flying)
            oldest = flying[0][0]
            grad = self.exchange(found, self.after, shapes[oldest], self.after)
            shape = shapes[number + 1] if number + 1 < count else None
            states = self.exchange(self.back(flying, grad), self.before, shape, self.before)
        while flying:
            grad = self.exchange(None, None, shapes[flying[0][0]], self.after)
            self.exchange(self.back(flying, grad), self.before, None, None)

    def run(self, number: int, states: Tensor | None, step: Forward[Y], flying: Flying) -> Run[Y]:
        if states is not None:
            states.requires_grad_()
        output = yield from step(number, states)
        flying.append((number, states, output))
        return output.detach()

    def back(self, flying: Flying, grad: Tensor | None) -> Tensor | None:
        """Runs backward of the micro-batch that is longest in flight; returns the gradient of the states it got."""
        _, states, output = flying.popleft()
        torch.autograd.backward(output, grad)
        return None if states is None else states.grad
