"""The experts that sequences in flight went to, token by token, for the trainer to choose again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paddock.engines.rollout.base import Chosen
from paddock.models.experts import Experts, Routing


class Routes:
    """The experts chosen in each slot: those of its prompt, shared by its responses, and of the tokens read since."""

    def __init__(self, experts: Experts, count: int, max_tokens: int, device: torch.device):
        self.experts = experts
        self.prompts: list[Tensor] = []
        shape = count, max_tokens, experts.layers, experts.top_k
        self.answers = torch.zeros(shape, dtype=experts.dtype, device=device)

    def watch(self) -> Routing:
        return Routing(self.experts)

    def prefilled(self, routing: Routing, lengths: Sequence[int], readers: Sequence[int]) -> None:
        """Records the choices of prompts end to end, each for `readers[i]` of the slots behind the live ones."""
        for prompt, count in zip(routing.chosen().cpu().split(list(lengths)), readers, strict=True):
            self.prompts += [prompt] * count

    def decoded(self, routing: Routing, drawn: Tensor) -> None:
        """Records the choices of the first slots for the last token that each has drawn."""
        rows = torch.arange(len(drawn), device=drawn.device)
        self.answers[rows, (drawn - 1).clamp(min=0)] = routing.chosen()

    def of(self, slots: Sequence[int], at: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns the choices of finished responses, for `chosen`; `at`: slots on the device. Copies may be pending."""
        return [self.prompts[slot] for slot in slots], self.answers[at].to("cpu", non_blocking=True)

    def move(self, movers: Sequence[int], holes: Sequence[int]) -> None:
        self.answers[list(holes)] = self.answers[list(movers)]
        for mover, hole in zip(movers, holes, strict=True):
            self.prompts[hole] = self.prompts[mover]

    def shrink(self, left: int) -> None:
        del self.prompts[left:]


def chosen(prompt: Tensor, answer: Tensor, tokens: int) -> Chosen:
    """Returns the experts of a response of `tokens` tokens; its last token was never read, so it has none."""
    answer = answer[:tokens].clone()
    answer[tokens - 1] = 0
    return Chosen(prompt, answer)
