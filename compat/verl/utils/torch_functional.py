"""Masked sums, log-probs and padding under verl's names; the numbers are `paddock.core.masked`'s."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paddock.algorithms.losses import entropy
from paddock.core import masked

Axis = int | tuple[int, ...] | None


def masked_sum(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    return torch.where(mask.bool(), values * mask, 0.0).sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    return masked_sum(values, mask, axis) / (mask.sum(dim=axis) + masked.EPS)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over the valid tokens, with n - 1 unless `unbiased` is False."""
    count = mask.sum()
    if unbiased and count <= 1:
        raise ValueError(f"a variance of {int(count)} tokens is not known")
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values of unit variance, around 0 or around their own mean."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + masked.EPS)
    return whitened if shift_mean else whitened + mean


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    return -F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none").reshape(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    return entropy(logits)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    return torch.max(torch.min(x, tensor_max), tensor_min)


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to the first end-of-sequence token, which counts."""
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()
    return (ends.cumsum(1) - ends == 0).to(dtype)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: int, left_pad: bool = False) -> Tensor:
    """Pads the last dimension; one that is long enough stays."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)
