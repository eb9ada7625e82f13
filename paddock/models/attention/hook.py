"""The attention function that transformers calls, registered as ``paddock``.

A forward hands an `Attention` through the model's layers as the argument ``attend``, so it is there again when a
checkpointed layer runs a second time, in whichever thread that happens. Without such an object the function is
transformers' plain SDPA with its usual masks, so that a model loaded with it also pads, generates and evaluates as any
other.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from paddock.errors import UserError
from paddock.kernels.arguments import Scores
from paddock.models.attention.choice import choose
from paddock.models.attention.interface import Attention, AttentionCall
from paddock.models.attention.padded import padded_attention

NAME = "paddock"
MASKED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Backends of torch's attention with a mask. cuDNN's is left out: from torch 2.11 on, its backward returns NaN for some
lengths on Hopper GPUs, https://github.com/pytorch/pytorch/issues/196678."""


def no_mask(device: torch.device) -> Tensor:
    """Returns an empty mask. transformers takes any mask of four dimensions as finished, and builds none of its own."""
    return torch.empty(1, 1, 0, 0, device=device)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attend: Attention | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes one attention module of a model that was loaded with ``attn_implementation="paddock"``."""
    if kwargs.get("position_bias") is not None:
        raise unsupported(module, "position biases")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attend is not None:
        return attend.attend(module, query, key, value, Scores(scale, sliding_window, softcap, s_aux)), None
    if attention_mask is not None and attention_mask.shape[-1] == 0:
        raise unsupported(module, "layers that keep arguments from their attention")
    scores = Scores(scale, None, softcap, s_aux)
    if choose("padded", AttentionCall(query, key, value, scores, key.shape[2])) == "products":
        return padded_attention(query, key, value, attention_mask, scores), None
    with sdpa_kernel(MASKED) if attention_mask is not None else nullcontext():
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )


def unsupported(module: nn.Module, what: str) -> UserError:
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", type(module).__name__)
    return UserError(
        f"{family} models have {what}, which packed attention does not know",
        key="actor_rollout_ref.model.path",
        value=getattr(config, "name_or_path", None) or None,
        fix="use a model of another family: docs/models.md lists those that are tested",
    )


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
