"""What a model sees of a prompt's images: made once for a prompt, and shared by all answers to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Images:
    """The output of an image processor, and where it belongs in the prompt's tokens. Lives on the host."""

    pixels: Tensor
    """``[patches, values]``: those of all images, one after the other."""
    grids: Tensor
    """``[images, 3]``: patches of each in time, height and width."""
    token_index: Tensor
    """``[N]``: indices of the prompt's tokens that stand for images, in the order of their features."""
    positions: Tensor
    """``[3, P]``: time, height and width of every token of the prompt."""
    offset: int
    """Position minus index of the tokens behind the prompt: negative, as an image takes fewer positions than tokens."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Images):
            return NotImplemented
        return self.offset == other.offset and all(map(torch.equal, self.tensors(), other.tensors()))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.pixels, self.grids, self.token_index, self.positions

    def __repr__(self) -> str:
        return f"Images({len(self.grids)} images, {len(self.token_index)} tokens)"
