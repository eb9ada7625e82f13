"""From rows of a batch to what a model reads, and from its hidden states back to one value a response token.

`pack` lays the rows end to end without padding; `pad` keeps them as rows of equal width. Both give `Inputs`, and the
same numbers. A row's last token is predicted but never read, so it stays out of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad as longer
from transformers import PreTrainedModel

from paddock.core.batch import Batch, PerRow, PerToken
from paddock.core.device import to_device
from paddock.core.images import Images
from paddock.models.attention import Packed
from paddock.models.attention.shared_prompts import ranges
from paddock.models.experts import ARGUMENT, Routing
from paddock.models.forward import hidden_states
from paddock.models.vision import Placed, place_images, plain, plain_positions


@dataclass(frozen=True, eq=False)
class Inputs:
    """What goes through a model, and which of its hidden states speak of which response token."""

    tokens: Tensor
    """``[1, T]`` packed, ``[B, P + R - 1]`` padded."""
    positions: Tensor
    """Shaped as tokens: indices in their own sequence; with images ``[3, ...]``: time, height and width."""
    packed: Packed | None
    mask: Tensor | None
    """1 on the tokens of padded rows, 0 on padding; None if packed."""
    states: Tensor
    """``[N]``: flat positions of the tokens whose hidden states are wanted, one for each response token that counts."""
    targets: Tensor
    """``[N]``: the response tokens that follow them."""
    places: Tensor
    """``[N]``: their indices in the flattened ``[B, R]``."""
    shape: tuple[int, int]
    cells: Tensor
    """One flat index into ``[B, P + R]`` per input token; -1 for padding and tokens that no wanted state depends on."""
    routing: Routing | None = None
    """Replays or records the choices of experts."""
    images: Placed | None = None
    """The images of packed tokens."""
    pixels: dict[str, Tensor] = field(default_factory=dict)
    """The images of padded tokens, as arguments of the model's own forward."""

    def hidden(self, backbone: PreTrainedModel) -> Tensor:
        """``[N, hidden]``: the state before each response token that counts."""
        if self.packed is not None and self.images is not None:
            found = self.images.hidden(backbone, self.tokens, self.positions, self.packed, self.routing)
        elif self.packed is not None:
            more = self.spare(backbone)
            tokens, positions = longer(self.tokens, (0, more)), longer(self.positions, (0, more))
            found = hidden_states(backbone, tokens, positions, self.packed, self.routing)
        else:
            found = backbone.base_model(
                input_ids=self.tokens,
                attention_mask=self.mask,
                position_ids=self.positions,
                use_cache=False,
                **self.pixels,
                **({ARGUMENT: self.routing} if self.routing else {}),
            ).last_hidden_state
        return found.flatten(0, 1).index_select(0, self.states)

    def spare(self, backbone: PreTrainedModel) -> int:
        """Returns how many unused tokens to append to the stream."""
        if self.packed is None or not self.packed.may_grow or self.routing is not None:
            return 0
        return spare(self.tokens.shape[1], backbone.dtype, self.tokens.device)

    def per_token(self, values: Tensor) -> PerToken:
        """``[N, ...] -> [B, R, ...]``, zero where no token counts."""
        rows, width = self.shape
        several = values.shape[1:]  # of what a token has several of
        return values.new_zeros(rows * width, *several).index_copy(0, self.places, values).view(rows, width, *several)


def spare(tokens: int, dtype: torch.dtype, device: torch.device, share: int = 32) -> int:
    """Returns how many more tokens to compute, at most one in `share`, so that few numbers of them ever occur.

    A CPU compiles a bf16 product anew for every shape: some milliseconds, and half a megabyte that stays.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return 0
    return -tokens % max(16, 1 << max(0, (tokens // share).bit_length() - 1))


def prompt_lengths(batch: Batch) -> PerRow:
    if batch.prompt_mask is None:
        return torch.full_like(batch.row, batch.prompts.shape[1])
    return (batch.prompt_mask != 0).sum(-1)


def sequence_lengths(batch: Batch) -> list[int]:
    """Tokens of each row, prompt and response."""
    return (prompt_lengths(batch) + batch.need("lengths")).tolist()


def counted(batch: Batch) -> Tensor:
    """bool ``[B, R]``: the response tokens whose prediction is asked for, those that the policy wrote."""
    responses = batch.need("responses")
    inside = torch.arange(responses.shape[1], device=responses.device) < batch.need("lengths").unsqueeze(-1)
    return inside if batch.mask is None else inside & (batch.mask != 0)


def images_of(batch: Batch) -> Sequence[Images | None]:
    """Returns the images of each row; empty if no row has any."""
    images = batch.extras.get("images", ())
    return images if any(images) else ()


def pack(batch: Batch, device: torch.device | str = "cpu") -> Inputs:
    """Rows end to end, sorted by length, without those that have no response token that counts.

    Laid out on the host, where nothing waits for the device.
    """
    batch = batch.to("cpu")
    prompts, responses = batch.prompts, batch.need("responses")
    lengths, prompt_length, wanted = batch.need("lengths"), prompt_lengths(batch), counted(batch)
    used = (prompt_length + lengths - 1) * wanted.any(-1)
    order = torch.argsort(used, stable=True)
    order = order[used[order] > 0]
    starts = torch.zeros_like(used)
    starts[order] = used[order].cumsum(0) - used[order]
    tokens, first = torch.cat([prompts, responses], 1), prompts.shape[1] - prompt_length  # of the row's own tokens
    own = used[order].tolist()
    rows, columns = order.repeat_interleave(used[order]), ranges(first[order].tolist(), own)
    row, step = wanted.nonzero(as_tuple=True)
    seen = images_of(batch) or [None] * len(batch)
    flat = to_device((columns - first[rows]).unsqueeze(0), device)
    positions, images = place_images([seen[i] for i in order.tolist()], own, device) or (flat, None)
    return Inputs(
        tokens=to_device(tokens[rows, columns].unsqueeze(0), device),
        positions=positions,
        images=images,
        packed=Packed(own, device),
        mask=None,
        states=to_device(starts[row] + prompt_length[row] + step - 1, device),
        targets=to_device(responses[row, step], device),
        places=to_device(row * responses.shape[1] + step, device),
        shape=(len(batch), responses.shape[1]),
        cells=to_device(rows * tokens.shape[1] + columns, device),
    )


def pad(batch: Batch, device: torch.device | str = "cpu") -> Inputs:
    """Rows as they stand in the batch, padding masked."""
    batch = batch.to("cpu")
    prompts, responses = batch.prompts, batch.need("responses")
    lengths, prompt_length, wanted = batch.need("lengths"), prompt_lengths(batch), counted(batch)
    width = prompts.shape[1] + responses.shape[1] - 1
    column = torch.arange(width, device=prompts.device)
    first = (prompts.shape[1] - prompt_length).unsqueeze(-1)
    mask = (column >= first) & (column < prompts.shape[1] + lengths.unsqueeze(-1))
    row, step = wanted.nonzero(as_tuple=True)
    cells = torch.arange(len(batch)).unsqueeze(-1) * (width + 1) + column
    read = mask & (column < prompts.shape[1] + lengths.unsqueeze(-1) - 1) & wanted.any(-1, keepdim=True)
    images = images_of(batch)
    positions = plain_positions(images, first[:, 0].tolist(), width) if images else (column - first).clamp(min=0)
    return Inputs(
        tokens=to_device(torch.cat([prompts, responses[:, :-1]], 1), device),
        positions=to_device(positions, device),
        pixels=plain(images, device),
        packed=None,
        mask=to_device(mask, device),
        states=to_device(row * width + prompts.shape[1] + step - 1, device),
        targets=to_device(responses[row, step], device),
        places=to_device(row * responses.shape[1] + step, device),
        shape=(len(batch), responses.shape[1]),
        cells=to_device(torch.where(read, cells, -1).flatten(), device),
    )
