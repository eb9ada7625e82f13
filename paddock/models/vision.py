"""Images in a forward: their features are computed once each, and stand in for the tokens that name them.

A text model's forward knows nothing of this. If a batch has images, `place_images` says which tokens of a packed stream
take which features, and where every token is in time, height and width; `Placed.hidden` calls the model's own tower,
embedding and decoder. `plain` gives what transformers' own forward of padded rows takes, which is the slow way to the
same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from paddock.core.images import Images
from paddock.errors import UserError
from paddock.models.attention import Attention, no_mask
from paddock.models.experts import ARGUMENT, Routing

VISION_TOKEN = re.compile(r"(image|video|vision)(_start|_end)?_token_id")


def has_tower(config: PreTrainedConfig) -> bool:
    """True if the model reads images."""
    return getattr(config, "vision_config", None) is not None


def vision_tokens(config: PreTrainedConfig) -> tuple[int, ...]:
    """Returns the tokens that only a processor writes: the policy never draws them.

    One in an answer would stand for an image that is not there. They have probability 0 in rollouts and in training
    alike, so both speak of the same distribution.
    """
    if not has_tower(config):
        return ()
    vocab_size = config.get_text_config().vocab_size
    found = {value for name, value in vars(config).items() if VISION_TOKEN.fullmatch(name) and isinstance(value, int)}
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    tower = getattr(model.base_model, "visual", None)
    return tower if isinstance(tower, nn.Module) else None


def freeze_tower(model: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Freezes the vision tower; `dtype` is the one to compute in, as an optimizer would give it to trained ones."""
    tower = tower_of(model)
    if tower is None:
        raise UserError(
            f"{model.config.model_type} models have no vision tower",
            key="actor_rollout_ref.actor.freeze_vision_tower",
            value=True,
            fix="leave it out",
        )
    tower.requires_grad_(False)
    if dtype is not None:
        tower.to(dtype)


def positions_of(images: Images | None, length: int) -> Tensor:
    """Returns ``[3, length]``: the prompt's positions, then rising ones; without images, three times the index."""
    index = torch.arange(length)
    if images is None:
        return index.expand(3, -1)
    prompt = images.positions.shape[1]
    return torch.cat([images.positions, (index[prompt:] + images.offset).expand(3, -1)], 1)[:, :length]


@dataclass(frozen=True, eq=False)
class Placed:
    """The images of a packed stream, each once, and the tokens that stand for them."""

    pixels: Tensor
    grids: Tensor
    token_index: Tensor
    """``[N]``: indices of those tokens in the stream."""
    features: Tensor
    """``[N]``: for each of them, the index of its feature among those of all images."""

    def hidden(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        positions: Tensor,
        how: Attention,
        routing: Routing | None = None,
    ) -> Tensor:
        """The last hidden states ``[1, T, hidden]``; ``tokens [1, T]``, ``positions [3, 1, T]``."""
        backbone: Any = model.base_model
        embedded = backbone.get_input_embeddings()(tokens)
        found = backbone.get_image_features(self.pixels.to(embedded.device), self.grids, return_dict=True)
        deep = [joined(level) for level in getattr(found, "deepstack_features", None) or ()]
        seen = joined(found.pooler_output)
        if len(self.token_index) == 0:  # weights that are spread over ranks are gathered by all of them, or by none
            nothing = torch.stack([level.sum() for level in (seen, *deep)]).sum() * 0.0
            embedded = embedded + nothing.to(embedded.dtype)
            deep = []
        chosen = seen.index_select(0, self.features).to(embedded.dtype)
        embedded = embedded.index_copy(1, self.token_index, chosen[None])
        extra: dict[str, Any] = {ARGUMENT: routing} if routing else {}
        if deep:
            mask = torch.zeros_like(tokens, dtype=torch.bool)
            mask[0, self.token_index] = True
            levels = [level.index_select(0, self.features) for level in deep]
            extra |= {"visual_pos_masks": mask, "deepstack_visual_embeds": levels}
        return backbone.language_model(
            inputs_embeds=embedded,
            position_ids=positions,
            attention_mask=no_mask(tokens.device),
            use_cache=False,
            attend=how,
            **extra,
        ).last_hidden_state

    def part(self, start: int, length: int) -> Placed:
        """Returns the images of a slice of the stream."""
        mine = (self.token_index >= start) & (self.token_index < start + length)
        return replace(self, token_index=self.token_index[mine] - start, features=self.features[mine])


def joined(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """Joins the features of all images: some versions of transformers return them image by image."""
    return parts if isinstance(parts, Tensor) else torch.cat(list(parts))


def place_images(
    images: Sequence[Images | None],
    lengths: Sequence[int],
    device: torch.device | str,
    begins: Sequence[int] | None = None,
) -> tuple[Tensor, Placed] | None:
    """Returns positions ``[3, 1, T]`` and images of sequences end to end; None if no sequence has images.

    Sequences of one prompt share their images, and the features of those are computed once. `begins`: the index in
    its own sequence of each one's first token, if those are not 0.
    """
    if not any(images):
        return None
    first: dict[int, int] = {}  # feature with which each prompt's begin
    distinct: list[Images] = []
    token_index, features = [], []
    start, known = 0, 0
    pieces = list(zip(images, lengths, begins or [0] * len(lengths), strict=True))
    for seen, length, begin in pieces:
        if seen is not None and begin == 0:
            if id(seen) not in first:
                first[id(seen)] = known
                known += len(seen.token_index)
                distinct.append(seen)
            token_index.append(seen.token_index + start)
            features.append(torch.arange(len(seen.token_index)) + first[id(seen)])
        start += length
    positions = torch.cat([positions_of(seen, begin + length)[:, begin:] for seen, length, begin in pieces], 1)
    pixels, grids = (torch.cat(parts) for parts in zip(*((one.pixels, one.grids) for one in distinct), strict=True))
    parts = (pixels, grids, torch.cat(token_index), torch.cat(features))
    placed = Placed(*(part.to(device, non_blocking=True) for part in parts))
    return positions[:, None].to(device, non_blocking=True), placed


def blank(model: PreTrainedModel, device: torch.device) -> Placed:
    """Returns a minimal image bound to no token. A rank without images runs it, so that all ranks call the tower."""
    config = model.config.vision_config
    side = config.spatial_merge_size
    values = config.in_channels * config.temporal_patch_size * config.patch_size**2
    nothing = torch.empty(0, dtype=torch.long, device=device)
    return Placed(
        torch.zeros(side * side, values, device=device),
        torch.tensor([[1, side, side]], device=device),
        nothing,
        nothing,
    )


def plain(images: Sequence[Images | None], device: torch.device | str) -> dict[str, Tensor]:
    """Returns the pixels of padded rows as arguments of the model's own forward, once per row even if equal."""
    shown = [seen for seen in images if seen is not None]
    if not shown:
        return {}
    return {
        "pixel_values": torch.cat([seen.pixels for seen in shown]).to(device),
        "image_grid_thw": torch.cat([seen.grids for seen in shown]).to(device),
    }


def plain_positions(images: Sequence[Images | None], starts: Sequence[int], width: int) -> Tensor:
    """Returns positions ``[3, B, width]`` of rows whose first token of their own is at `starts`; 0 before it."""
    rows = [
        torch.cat([torch.zeros(3, start, dtype=torch.long), positions_of(seen, width - start)], 1)
        for seen, start in zip(images, starts, strict=True)
    ]
    return torch.stack(rows, 1)
