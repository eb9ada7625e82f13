"""One forward, one backward: each stage of a pipeline keeps as many micro-batches in flight as stages follow it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

Forward = Callable[[int, Tensor | None], Tensor]
"""(micro-batch, states of the stage before) -> states; of the last stage its share of the loss."""


class Pipeline:
    """The stages before and after this one. `shapes` are those of the states between stages, by micro-batch."""

    def __init__(self, ranks: dist.ProcessGroup, device: torch.device, dtype: torch.dtype):
        self.stage, self.stages, self.ranks = ranks.rank(), ranks.size(), ranks
        self.device, self.dtype = device, dtype
        self.before = None if self.stage == 0 else dist.get_global_rank(ranks, self.stage - 1)
        self.after = None if self.stage == self.stages - 1 else dist.get_global_rank(ranks, self.stage + 1)

    def exchange(
        self, send: Tensor | None, to: int | None, shape: tuple[int, ...] | None, source: int | None
    ) -> Tensor | None:
        """Both ways at once: a stage that only sends and one that only receives would wait for each other."""
        ops, room = [], None
        if to is not None and send is not None:
            ops.append(dist.P2POp(dist.isend, send.contiguous(), to, group=self.ranks))
        if source is not None and shape is not None:
            room = torch.empty(shape, dtype=self.dtype, device=self.device)
            ops.append(dist.P2POp(dist.irecv, room, source, group=self.ranks))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return room

    @torch.no_grad()
    def forward(self, shapes: list[tuple[int, ...]], step: Forward) -> None:
        for number, shape in enumerate(shapes):
            found = step(number, self.exchange(None, None, shape, self.before))
            self.exchange(found, self.after, None, None)

    def train(self, shapes: list[tuple[int, ...]], step: Forward) -> None:
        """Forward and backward of every micro-batch."""
        count = len(shapes)
        early = min(self.stages - self.stage - 1, count)
        flying: deque[tuple[int, Tensor | None, Tensor]] = deque()
        for number in range(early):
            states = self.exchange(None, None, shapes[number], self.before)
            self.exchange(self.run(number, states, step, flying), self.after, None, None)
        states = self.exchange(None, None, shapes[early], self.before) if early < count else None
        for number in range(early, count):
            found = self.run(number, states, step, flying)
            oldest = flying[0][0]
            grad = self.exchange(found, self.after, shapes[oldest], self.after)
            shape = shapes[number + 1] if number + 1 < count else None
            states = self.exchange(self.back(flying, grad), self.before, shape, self.before)
        while flying:
            grad = self.exchange(None, None, shapes[flying[0][0]], self.after)
            self.exchange(self.back(flying, grad), self.before, None, None)

    def run(
        self, number: int, states: Tensor | None, step: Forward, flying: deque[tuple[int, Tensor | None, Tensor]]
    ) -> Tensor:
        if states is not None:
            states.requires_grad_()
        found = step(number, states)
        flying.append((number, states, found))
        return found.detach()

    def back(self, flying: deque[tuple[int, Tensor | None, Tensor]], grad: Tensor | None) -> Tensor | None:
        """Of the micro-batch that is longest in flight; the gradient of what came in."""
        _, states, found = flying.popleft()
        torch.autograd.backward(found, grad)
        return None if states is None else states.grad
