"""The numbers of a step. Every one names its own reduction; tensors are reduced where they are and travel once.

Where nothing counts (all rows aborted, all tokens rejected) a mean, maximum or minimum is zero, as in core.masked.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paddock.core.batch import Batch, PerToken
from paddock.core.masked import masked_mean, masked_sum
from paddock.facts.models import ModelShape

GIB = 1024**3
COUNTED = ("num_turns", "tool_call_counts")

PEAK_TFLOPS = {
    ("B200",): 2250, ("H200",): 989, ("GH200",): 989, ("H800",): 989, ("H20",): 148,
    ("H100", "PCIE"): 756, ("H100", "NVL"): 835, ("H100",): 989, ("A100",): 312, ("A800",): 312,
    ("L40S",): 362, ("L40",): 181, ("L4",): 121, ("A6000",): 155, ("A10",): 125,
    ("5090",): 210, ("4090",): 165, ("3090",): 71,
}  # fmt: skip
"""Dense bf16 with fp32 sums, by the maker's data sheets; the words are parts of the device's name."""


@torch.no_grad()
def batch_metrics(batch: Batch, max_prompt: int, max_response: int, use_critic: bool) -> dict[str, float]:
    """What the step's rows look like. A row without response tokens is aborted and has no score."""
    mask = batch.need("mask") != 0
    lengths, prompt_lengths = batch.need("lengths"), batch.need("prompt_mask").sum(-1)
    answered = lengths > 0
    everyone = torch.ones_like(answered)
    found = {
        **summary("critic/score", batch.need("scores").sum(-1), answered),
        **summary("critic/rewards", batch.need("rewards").sum(-1), answered),
        **summary("critic/advantages", batch.need("advantages"), mask),
        **summary("critic/returns", batch.need("returns"), mask),
        **length_summary("response_length", lengths, everyone, max_response),
        **length_summary("response_length_non_aborted", lengths, answered, max_response),
        "response/aborted_ratio": mean(~answered, everyone),
        **length_summary("prompt_length", prompt_lengths, everyone, max_prompt),
    }
    if use_critic:
        returns, values = batch.need("returns"), batch.need("values")
        found |= summary("critic/values", values, mask)
        found["critic/vf_explained_var"] = 1 - variance(returns - values, mask) / (variance(returns, mask) + 1e-5)
    if batch.rollout_log_probs is not None and batch.old_log_probs is not None:
        found |= mismatch(batch.old_log_probs, batch.rollout_log_probs, mask)
    return to_floats(found) | counted(batch)


def mismatch(trained: PerToken, sampled: PerToken, mask: Tensor) -> dict[str, Tensor]:
    """``|p - q|`` of the sampled tokens' probabilities by trainer and rollout engine, and their correlation."""
    p, q = (x.masked_fill(~mask, 0).double().exp() for x in (trained, sampled))
    gap = summary("gap", (p - q).abs(), mask)
    p_centred, q_centred = p - mean(p, mask), q - mean(q, mask)
    norm = (masked_sum(p_centred.square(), mask) * masked_sum(q_centred.square(), mask)).sqrt()
    same = (gap["gap/max"] == 0).double()
    return {
        "training/rollout_probs_diff_valid": mask.any(),
        "training/rollout_probs_diff_max": gap["gap/max"],
        "training/rollout_probs_diff_mean": gap["gap/mean"],
        "training/rollout_probs_diff_std": variance((p - q).abs(), mask).sqrt(),
        "training/rollout_actor_probs_pearson_corr": torch.where(
            norm > 0, masked_sum(p_centred * q_centred, mask) / norm, same
        ),
    }


@torch.no_grad()
def variance_proxy_metrics(batch: Batch, grad_norm: float) -> dict[str, float]:
    """Signal and noise of the gradient from forward passes alone; empty unless `sum_pi_squared` is there.

    With ``W = sum_t w_t^2 (1 - 2 pi_t + sum_v pi_v^2)``, the squared norm of a row's gradient in the logits, and A the
    row's mean advantage: signal ``|g|^2``, total power ``E[A^2 W]``, noise of the mean ``(power - signal) / (N - 1)``.
    """
    if batch.sum_pi_squared is None:
        return {}
    mask = batch.need("mask")
    energy = 1 - 2 * batch.need("old_log_probs").exp() + batch.sum_pi_squared
    if batch.weights is not None:
        energy = energy * batch.weights.square()
    advantage = masked_mean(batch.need("advantages"), mask, -1)
    energy = masked_sum(energy, mask, -1)
    signal = torch.full_like(energy[0], grad_norm**2)
    power = (advantage.square() * energy.clamp(min=0)).mean()
    return to_floats(
        {
            "variance_proxy/proxy1_signal_strength": signal,
            "variance_proxy/proxy2_total_power": power,
            "variance_proxy/proxy3_pure_noise": ((power - signal) / max(len(batch) - 1, 1)).clamp(min=0),
            "variance_proxy/expected_a_squared": advantage.square().mean(),
            "variance_proxy/expected_w": energy.mean(),
        }
    )


def balance_metrics(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Tokens a rank gets: had the rows been cut in order, and with `parts` (row indices for each rank)."""
    start, before = 0, []
    for part in parts:
        before.append(sum(lengths[start : start + len(part)]))
        start += len(part)
    after = [sum(lengths[i] for i in part) for part in parts]
    return {
        "global_seqlen/min": float(min(before)),
        "global_seqlen/max": float(max(before)),
        "global_seqlen/minmax_diff": float(max(before) - min(before)),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": sum(after) / len(parts),
    }


def token_counts(batch: Batch) -> tuple[int, int]:
    """Tokens of all responses, and of prompts and responses together."""
    responses = batch.need("lengths").sum()
    both = torch.stack([responses, responses + batch.need("prompt_mask").sum()])
    response_tokens, all_tokens = both.long().tolist()
    return response_tokens, all_tokens


def throughput_metrics(
    tokens: int, seconds: float, devices: int, memory: tuple[int, int] | None = None
) -> dict[str, float]:
    """`memory`: peak bytes of one device, allocated and reserved; None on a CPU."""
    found = {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * devices),
        "perf/cpu_memory_used_gb": resident_bytes() / GIB,
    }
    if memory is not None:
        allocated, reserved = memory
        found |= {"perf/max_memory_allocated_gb": allocated / GIB, "perf/max_memory_reserved_gb": reserved / GIB}
    return found


def mfu(
    shape: ModelShape, lengths: Iterable[int], seconds: float, devices: int, device_name: str, *, backward: bool = True
) -> float | None:
    """Model FLOPs utilisation: what the model needs over what the devices can do; None for an unknown device."""
    peak = peak_flops(device_name)
    return None if peak is None else model_flops(shape, lengths, backward) / (seconds * devices * peak)


def model_flops(shape: ModelShape, lengths: Iterable[int], backward: bool = True) -> float:
    """``2 N T + 2 L d sum s^2`` forward (matrices, causal attention), twice that backward.  arXiv:2204.02311, app. B

    N counts the parameters in matrix products: the input embedding is a table, unless the head shares it.
    """
    lengths = list(lengths)
    table = 0 if shape.tied_embeddings and not shape.scalar_head else shape.vocab * shape.hidden
    products = 2 * (shape.active_parameters - table) * sum(lengths)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * sum(length**2 for length in lengths)
    return float((products + attention) * (3 if backward else 1))


def peak_flops(device_name: str) -> float | None:
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    return next((1e12 * tera for needed, tera in PEAK_TFLOPS.items() if words.issuperset(needed)), None)


def resident_bytes() -> int:
    """Memory of this process; its peak where the system does not tell the present."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def summary(name: str, x: Tensor, valid: Tensor) -> dict[str, Tensor]:
    wide, empty = x.double(), ~valid.any()
    highest, lowest = wide.masked_fill(~valid, -torch.inf).max(), wide.masked_fill(~valid, torch.inf).min()
    return {
        f"{name}/mean": mean(wide, valid),
        f"{name}/max": highest.masked_fill(empty, 0),
        f"{name}/min": lowest.masked_fill(empty, 0),
    }


def length_summary(name: str, lengths: Tensor, valid: Tensor, longest: int) -> dict[str, Tensor]:
    return summary(name, lengths, valid) | {f"{name}/clip_ratio": mean(lengths >= longest, valid)}


def mean(x: Tensor, valid: Tensor) -> Tensor:
    return masked_sum(x.double(), valid) / valid.sum().clamp(min=1)


def variance(x: Tensor, valid: Tensor) -> Tensor:
    """Unbiased; zero for a single value."""
    centred = x.double() - mean(x, valid)
    return masked_sum(centred.square(), valid) / (valid.sum() - 1).clamp(min=1)


def counted(batch: Batch) -> dict[str, float]:
    """Turns and tool calls a row, where the agent loop counted them."""
    found: dict[str, float] = {}
    for name in COUNTED:
        values = [float(value) for value in batch.extras.get(name, ())]
        if values:
            found |= {f"{name}/min": min(values), f"{name}/max": max(values), f"{name}/mean": sum(values) / len(values)}
    return found


def to_floats(found: Mapping[str, Tensor]) -> dict[str, float]:
    """One transfer for all."""
    return dict(zip(found, torch.stack([value.double() for value in found.values()]).tolist(), strict=True))
