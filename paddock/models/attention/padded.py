"""Attention over rows of equal width whose scores are capped (Gemma 2) or have sinks (gpt-oss), in plain products.

blocks.py and sinks.py have the same for packed sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

from paddock.kernels.arguments import Scores
from paddock.models.attention.sinks import with_sink


def padded_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Computes softmax(c tanh(s q k / c)) v of ``query [N, H, L, D]`` over ``key, value [N, K, S, D]``, without a
    window. ``mask`` is True where a key is seen, None: causal. Returns ``[N, L, H, Dv]``."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    z = query @ key.transpose(-1, -2)
    if scores.softcap is None:
        z = z * scores.scaling
    else:
        z = scores.softcap * torch.tanh(z * (scores.scaling / scores.softcap))
    if mask is None:
        mask = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril(key.shape[2] - query.shape[2])
    if scores.sinks is None:
        weights = z.float().masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1)
    else:
        z = z.masked_fill(~mask, torch.finfo(z.dtype).min)
        weights = with_sink(z, scores.sinks.view(1, -1, 1, 1).expand(*z.shape[:3], 1))
    return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()
