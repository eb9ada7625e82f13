"""The critic: a causal LM's backbone with one number a token in place of the vocabulary's logits."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """V = w.h + b, with h the hidden state before a token. The head starts at zero, and stays in float32."""

    def __init__(self, backbone: PreTrainedModel):
        super().__init__()
        self.backbone = backbone
        hidden = backbone.config.get_text_config().hidden_size
        self.value_head = nn.Linear(hidden, 1, device=backbone.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def values(self, hidden: Tensor) -> Tensor:
        """``[N, hidden] -> [N]``"""
        head = self.value_head
        wide = torch.promote_types(hidden.dtype, head.weight.dtype)
        if wide == head.weight.dtype:  # as a module: an engine that shards it gathers it around this call
            return head(hidden.to(wide)).squeeze(-1)
        return linear(hidden.to(wide), head.weight.to(wide), head.bias.to(wide)).squeeze(-1)

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Saves the backbone as `transformers` loads it, and the head in a file beside it. `weights` replace the
        model's own."""
        state = weights or self.state_dict()
        parts: dict[str, dict[str, Tensor]] = {"backbone": {}, "value_head": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor.contiguous()
        self.backbone.save_pretrained(folder, state_dict=parts["backbone"])
        save_file(parts["value_head"], folder / HEAD_FILE)

    def load_head(self, folder: Path) -> None:
        """Loads the head that lies beside a saved backbone; without one, a fresh critic starts at zero."""
        if (folder / HEAD_FILE).is_file():
            self.value_head.load_state_dict(load_file(folder / HEAD_FILE))
