"""A group's prompt computed once for all its responses: the same numbers as `packing.pack`, from fewer tokens.

The stream is all prompts, then all responses. A response's queries attend to its prompt and to itself; its tokens stand
at the positions that they have behind the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from paddock.core.batch import Batch
from paddock.core.device import flash_attention
from paddock.kernels.arguments import Families
from paddock.models.attention import Packed, flash_can
from paddock.models.blocks import Block, blocks_of
from paddock.models.packing import Inputs, counted, images_of, prompt_lengths
from paddock.models.sinks import packed_sinks
from paddock.models.vision import Placed, place

PAYS = 0.95
"""Share of the tokens that may at most be left: layouts with two kinds of sequences have a price of their own."""


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
        self.max_len = max(self.key_lengths, default=0)  # decides whether a window hides anything

    @cached_property
    def key_ends(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.key_lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def sources(self) -> Tensor:
        """Which token of the stream each key of `key_lengths` is."""
        own, start = sum(self.prompts), 0
        pieces = [(0, own)]
        for prompt, group in zip(self.prompts, self.responses, strict=True):
            for length in group:
                pieces += [(start, prompt), (own, length)]
                own += length
            start += prompt
        return ranges(*zip(*pieces, strict=True)).to(self.device, non_blocking=True)

    @cached_property
    def families(self) -> Families:
        """A prompt and the responses to it."""
        spans = iter(
            [slice(end - length, end) for end, length in zip(accumulate(self.lengths), self.lengths, strict=True)]
        )
        prompts = [next(spans) for _ in self.prompts]
        return Families(
            [[prompt, *(next(spans) for _ in group)] for prompt, group in zip(prompts, self.responses, strict=True)]
        )

    @cached_property
    def blocks(self) -> list[Block]:
        """Those of prompts, then those of responses, which may be to several of them."""
        ends = accumulate(self.prompts)
        prompts = [slice(end - length, end) for end, length in zip(ends, self.prompts, strict=True)]
        behind = [prompt for prompt, group in zip(prompts, self.responses, strict=True) for _ in group]
        responses = self.lengths[len(prompts) :]
        return [
            *blocks_of(self.prompts, self.device),
            *blocks_of(responses, self.device, sum(self.prompts), behind),
        ]

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [T, H or K, D]
        window = None if window is None or window >= self.max_len else window
        if sinks is not None:
            found: Any = packed_sinks(q, k, v, self.blocks, scaling, window, sinks)
        elif flash_can(q, v, window, softcap):
            keys, values = Repeated.apply(k, self.sources), Repeated.apply(v, self.sources)
            found = flash_attention(
                q, keys, values, self.cu_seqlens, self.lengths, scaling, window, self.key_ends, self.key_lengths
            )
        else:
            found = self.without_flash(q, k, v, scaling, window, softcap)
        return found.unsqueeze(0)


class Repeated(torch.autograd.Function):
    """Rows of a stream, some of them several times; their gradients are summed in float32."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, sources: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        ctx.length = len(stream)
        return stream.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (sources,) = grads, ctx.saved_tensors
        total = grad.new_zeros(ctx.length, *grad.shape[1:], dtype=torch.promote_types(grad.dtype, torch.float32))
        return total.index_add_(0, sources, grad.to(total.dtype)).to(grad.dtype), None


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows by the prompt they share, its images included."""

    rows: list[list[int]]
    prompt: list[int]
    """Tokens of each group's prompt."""
    response: list[int]
    """Tokens of each row's response, of all rows of the batch."""

    @classmethod
    def of(cls, batch: Batch, wanted: Tensor) -> Groups:
        """Of the rows that are wanted, a bool ``[B]``."""
        own = batch.prompts if batch.prompt_mask is None else torch.where(batch.prompt_mask != 0, batch.prompts, -1)
        images = images_of(batch) or [None] * len(batch)
        members: dict[tuple[bytes, int], list[int]] = {}
        for row, (prompt, seen, counts) in enumerate(zip(own.cpu().numpy(), images, wanted.tolist(), strict=True)):
            if counts:
                members.setdefault((prompt.tobytes(), id(seen)), []).append(row)
        rows, lengths = list(members.values()), prompt_lengths(batch).tolist()
        return cls(rows, [lengths[group[0]] for group in rows], batch.need("lengths").tolist())


def parts_of_groups(batch: Batch, budget: int) -> tuple[list[list[int]], list[int]]:
    """Rows that go through the model together, and the tokens that takes: a group, or as much of it as there is room
    for."""
    groups = Groups.of(batch, torch.ones(len(batch), dtype=torch.bool))
    parts: list[list[int]] = []
    tokens: list[int] = []
    for rows, prompt in zip(groups.rows, groups.prompt, strict=True):
        room = 0
        for row in rows:
            length = groups.response[row]
            if length > room:
                parts.append([])
                tokens.append(prompt)
                room = budget - prompt
            parts[-1].append(row)
            tokens[-1] += length
            room -= length
    return parts, tokens


def pack_shared(batch: Batch, device: torch.device | str = "cpu") -> Inputs | None:
    """The rows with each prompt once, or None where that would save little. Laid out on the host, as `pack` does."""
    batch = batch.to("cpu")
    groups, lengths, width = Groups.of(batch, counted(batch).any(-1)), prompt_lengths(batch), batch.prompts.shape[1]
    answers = sum(groups.response[row] - 1 for rows in groups.rows for row in rows)
    alone = sum(prompt * len(rows) for rows, prompt in zip(groups.rows, groups.prompt, strict=True)) + answers
    together = sum(groups.prompt) + answers
    if together >= PAYS * alone:
        return None
    order = sorted(range(len(groups.rows)), key=lambda group: groups.prompt[group])
    members = [sorted(groups.rows[group], key=lambda row: groups.response[row]) for group in order]
    prompts = [groups.prompt[group] for group in order]
    responses = [[groups.response[row] - 1 for row in rows if groups.response[row] > 1] for rows in members]
    ends = list(accumulate(prompts))
    last, first = [0] * len(batch), [0] * len(batch)  # of a row: its prompt's last token, its response's first
    place = sum(prompts)
    for rows, end in zip(members, ends, strict=True):
        for row in rows:
            last[row], first[row] = end - 1, place
            place += groups.response[row] - 1
    tokens = torch.cat([batch.prompts, batch.need("responses")], 1)
    owner, column = cells_of(members, prompts, groups.response, width)
    flat = (column - width + lengths[owner]).unsqueeze(0).to(device, non_blocking=True)
    positions, images = images_in(batch, members, prompts, groups.response, device) or (flat, None)
    speaker, step = counted(batch).nonzero(as_tuple=True)
    states = torch.where(step == 0, torch.tensor(last)[speaker], torch.tensor(first)[speaker] + step - 1)
    return Inputs(
        tokens=tokens[owner, column].unsqueeze(0).to(device, non_blocking=True),
        positions=positions,
        images=images,
        packed=SharedPrompts(prompts, responses, device),
        mask=None,
        states=states.to(device, non_blocking=True),
        targets=batch.need("responses")[speaker, step].to(device, non_blocking=True),
        places=(speaker * batch.need("responses").shape[1] + step).to(device, non_blocking=True),
        shape=(len(batch), batch.need("responses").shape[1]),
        cells=(owner * tokens.shape[1] + column).to(device, non_blocking=True),
    )


def images_in(
    batch: Batch, members: list[list[int]], prompts: list[int], response: list[int], device: torch.device | str
) -> tuple[Tensor, Placed] | None:
    """Positions and images of the stream, where the rows have images: they stand in the prompts alone."""
    images = images_of(batch)
    if not images:
        return None
    pieces = [(images[rows[0]], prompt, 0) for rows, prompt in zip(members, prompts, strict=True)]
    for rows, prompt in zip(members, prompts, strict=True):
        pieces += [(images[row], response[row] - 1, prompt) for row in rows]
    seen, lengths, begins = zip(*pieces, strict=True)
    return place(seen, lengths, device, begins)


def cells_of(members: list[list[int]], prompts: list[int], response: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Row and column, in prompts and responses side by side, of each token of the stream."""
    pieces = [(rows[0], width - prompt, width) for rows, prompt in zip(members, prompts, strict=True)]
    pieces += [(row, width, width + response[row] - 1) for rows in members for row in rows]
    counts = [stop - start for _, start, stop in pieces]
    rows = torch.tensor([row for row, _, _ in pieces]).repeat_interleave(torch.tensor(counts))
    return rows, ranges([start for _, start, _ in pieces], counts)


def ranges(starts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """So many numbers from each start on, one after the other."""
    begins, sizes = torch.tensor(starts), torch.tensor(counts)
    before = sizes.cumsum(0) - sizes
    return (begins - before).repeat_interleave(sizes) + torch.arange(int(sizes.sum()))
