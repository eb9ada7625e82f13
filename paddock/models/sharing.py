"""A group's prompt computed once for all its responses: the same numbers as `packing.pack`, from fewer tokens.

The stream is all prompts, then all responses, at the positions that they have behind their prompt. What they attend to
is in attention/shared_prompts.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from paddock.core.batch import Batch
from paddock.core.device import to_device
from paddock.models.attention.shared_prompts import SharedPrompts, ranges
from paddock.models.packing import Inputs, counted, images_of, prompt_lengths
from paddock.models.vision import Placed, place_images

PAYS = 0.95
"""Prompts are shared only if the number of tokens falls below this fraction: the mixed layout has an overhead."""


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
        """Groups the rows that are `wanted`, a bool ``[B]``, by prompt."""
        own = batch.prompts if batch.prompt_mask is None else torch.where(batch.prompt_mask != 0, batch.prompts, -1)
        images = images_of(batch) or [None] * len(batch)
        members: dict[tuple[bytes, int], list[int]] = {}
        for row, (prompt, seen, counts) in enumerate(zip(own.cpu().numpy(), images, wanted.tolist(), strict=True)):
            if counts:
                members.setdefault((prompt.tobytes(), id(seen)), []).append(row)
        rows, lengths = list(members.values()), prompt_lengths(batch).tolist()
        return cls(rows, [lengths[group[0]] for group in rows], batch.need("lengths").tolist())


def parts_of_groups(batch: Batch, budget: int) -> tuple[list[list[int]], list[int]]:
    """Returns the rows that go through the model together, and their tokens: a group, or as much of it as the budget
    allows."""
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
    """Packs the rows with each prompt once; None if that would save little. Laid out on the host, as `pack` does."""
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
    start = sum(prompts)
    for rows, end in zip(members, ends, strict=True):
        for row in rows:
            last[row], first[row] = end - 1, start
            start += groups.response[row] - 1
    tokens = torch.cat([batch.prompts, batch.need("responses")], 1)
    owner, column = cells_of(members, prompts, groups.response, width)
    flat = to_device((column - width + lengths[owner]).unsqueeze(0), device)
    positions, images = images_in(batch, members, prompts, groups.response, device) or (flat, None)
    speaker, step = counted(batch).nonzero(as_tuple=True)
    states = torch.where(step == 0, torch.tensor(last)[speaker], torch.tensor(first)[speaker] + step - 1)
    return Inputs(
        tokens=to_device(tokens[owner, column].unsqueeze(0), device),
        positions=positions,
        images=images,
        packed=SharedPrompts(prompts, responses, device),
        mask=None,
        states=to_device(states, device),
        targets=to_device(batch.need("responses")[speaker, step], device),
        places=to_device(speaker * batch.need("responses").shape[1] + step, device),
        shape=(len(batch), batch.need("responses").shape[1]),
        cells=to_device(owner * tokens.shape[1] + column, device),
    )


def images_in(
    batch: Batch, members: list[list[int]], prompts: list[int], response: list[int], device: torch.device | str
) -> tuple[Tensor, Placed] | None:
    """Returns positions and images of the stream, None without images; images stand in the prompts alone."""
    images = images_of(batch) or [None] * len(batch)
    pieces = [(images[rows[0]], prompt, 0) for rows, prompt in zip(members, prompts, strict=True)]
    for rows, prompt in zip(members, prompts, strict=True):
        pieces += [(images[row], response[row] - 1, prompt) for row in rows]
    seen, lengths, begins = zip(*pieces, strict=True)
    return place_images(seen, lengths, device, begins)


def cells_of(members: list[list[int]], prompts: list[int], response: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Returns row and column, in prompts and responses side by side, of each token of the stream."""
    pieces = [(rows[0], width - prompt, width) for rows, prompt in zip(members, prompts, strict=True)]
    pieces += [(row, width, width + response[row] - 1) for rows in members for row in rows]
    counts = [stop - start for _, start, stop in pieces]
    rows = torch.tensor([row for row, _, _ in pieces]).repeat_interleave(torch.tensor(counts))
    return rows, ranges([start for _, start, _ in pieces], counts)
