"""Attention with capped scores over rows of equal width (Gemma 2). blocks.py has the same for packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float,
) -> Tensor:
    """Computes softmax(c tanh(s q k / c)) v over a padded batch; ``mask`` is True where a key is seen, None: causal."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(key.shape[2] - query.shape[2])
    weights = scores.float().masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1)
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()
