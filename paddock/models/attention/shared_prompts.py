"""Prompts computed once for all their responses: a response's queries attend to its prompt and to itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paddock.core.device import flash_attention, to_device
from paddock.kernels.arguments import PromptGroups, Stretch
from paddock.kernels.launch import can_launch, has_triton
from paddock.models.attention.blocks import Block, blocks_of
from paddock.models.attention.interface import AttentionCall
from paddock.models.attention.packed import Packed

if has_triton():
    from paddock.kernels.repeat import Tiles, repeat, repeat_backward


class SharedPrompts(Packed):
    """Prompts end to end, then the responses to the first of them, to the second, ...

    `responses[i]` are the lengths of those to prompt i. A kernel that reads one stretch of keys a sequence is given the
    prompt's again for each response: they are a small part of what a token costs.
    """

    def __init__(self, prompts: Sequence[int], responses: Sequence[Sequence[int]], device: torch.device | str = "cpu"):
        super().__init__([*prompts, *(length for group in responses for length in group)], device)
        self.prompts, self.responses = list(prompts), [list(group) for group in responses]
        behind = [prompt + length for prompt, group in zip(prompts, responses, strict=True) for length in group]
        self.key_lengths = [*prompts, *behind]
        self.copied: dict[int, Tiles] = {}  # by the numbers of a token
        self.max_len = max(self.key_lengths, default=0)  # decides whether a window hides anything

    @cached_property
    def key_ends(self) -> Tensor:
        return to_device(torch.tensor([0, *accumulate(self.key_lengths)], dtype=torch.int32), self.device)

    @cached_property
    def sources(self) -> Tensor:
        """The token of the stream that each key of `key_lengths` is."""
        copies = sorted((place, s.start, s.length) for s in self.stretches for place in s.copies)
        _, starts, lengths = zip(*copies, strict=True)
        return to_device(ranges(starts, lengths), self.device)

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Prompts, then responses: where the keys of each are in the stream, and at which places of `key_lengths`."""
        places, starts = iter([0, *accumulate(self.key_lengths)]), iter([0, *accumulate(self.lengths)])
        alone = [next(places) for _ in self.prompts]
        reads = [[next(places) for _ in group] for group in self.responses]
        found = [
            Stretch(next(starts), prompt, [place, *copies])
            for prompt, place, copies in zip(self.prompts, alone, reads, strict=True)
        ]
        for prompt, copies, group in zip(self.prompts, reads, self.responses, strict=True):
            found += [
                Stretch(next(starts), length, [place + prompt]) for length, place in zip(group, copies, strict=True)
            ]
        return found

    def tiles_of(self, keys: Tensor, values: Tensor) -> Tiles | None:
        """Returns what a kernel that copies them reads; None where none can."""
        if not can_launch(keys) or keys.shape[1:] != values.shape[1:]:
            return None
        width = keys[0].numel()
        if width not in self.copied:
            self.copied[width] = Tiles.of(self.stretches, width, keys.device)
        return self.copied[width]

    @cached_property
    def prompt_groups(self) -> PromptGroups:
        """The groups of the kernel for short sequences: a prompt and the responses to it."""
        prompts, responses = self.spans[: len(self.prompts)], iter(self.spans[len(self.prompts) :])
        groups = zip(prompts, self.responses, strict=True)
        return PromptGroups([[prompt, *(next(responses) for _ in group)] for prompt, group in groups])

    @cached_property
    def blocks(self) -> list[Block]:
        """The blocks of prompts, then those of responses; a block may have responses to several prompts."""
        prompts, responses = self.spans[: len(self.prompts)], self.lengths[len(self.prompts) :]
        behind = [prompt for prompt, group in zip(prompts, self.responses, strict=True) for _ in group]
        return [
            *blocks_of(self.prompts, self.device),
            *blocks_of(responses, self.device, sum(self.prompts), behind),
        ]

    def flash(self, call: AttentionCall) -> Tensor:
        """Computes one layer's call with the device's own kernel; it gets the prompt's keys again for each response."""
        keys, values = Repeated.apply(call.k, call.v, self)
        ends, key_ends = (self.cu_seqlens, self.lengths), (self.key_ends, self.key_lengths)
        return flash_attention(call.q, keys, values, *ends, call.scores.scaling, call.scores.window, *key_ends)


class Repeated(torch.autograd.Function):
    """Repeats the keys and values of prompts for each response, in the order of `SharedPrompts.key_lengths`; gradients
    of the copies are summed in float32."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, how: SharedPrompts) -> tuple[Tensor, Tensor]:
        ctx.how, ctx.tokens = how, len(keys)
        if tiles := how.tiles_of(keys, values):
            return repeat(keys, values, tiles, sum(how.key_lengths))
        return keys.index_select(0, how.sources), values.index_select(0, how.sources)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (dkeys, dvalues), how = grads, ctx.how
        if tiles := how.tiles_of(dkeys, dvalues):
            return *repeat_backward(dkeys, dvalues, tiles, ctx.tokens), None
        return summed(dkeys, how.sources, ctx.tokens), summed(dvalues, how.sources, ctx.tokens), None


def summed(grad: Tensor, sources: Tensor, tokens: int) -> Tensor:
    """Sums the gradients of all copies of a token, where no kernel does."""
    total = grad.new_zeros(tokens, *grad.shape[1:], dtype=torch.promote_types(grad.dtype, torch.float32))
    return total.index_add_(0, sources, grad.to(total.dtype)).to(grad.dtype)


def ranges(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Returns `counts[i]` numbers from `starts[i]` on, for each i, one after the other."""
    begins, sizes = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    before = sizes.cumsum() - sizes
    return torch.from_numpy((begins - before).repeat(sizes) + np.arange(sizes.sum()))
