"""The numbers of a step. Every one names its own reduction; tensors are reduced where they are and travel once.

Where nothing counts (all rows aborted, all tokens rejected) a mean, maximum or minimum is zero, as in core.masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paddock.algorithms.selection import informative_groups
from paddock.core.batch import Batch, PerToken
from paddock.core.masked import masked_sum
from paddock.trainer.learning import ALIKE, SAME_PROMPTS, TOKEN_AGE

COUNTED = {"num_turns": "num_turns", "tool_call_counts": "tool_call_counts", "tool_seconds": "agent_loop/tool_calls"}
"""Columns of conversations whose least, most and mean are metrics, and the metrics' names."""
MEANS = ("malformed_calls", "failed_calls", "cut_results", "timeouts")


@torch.no_grad()
def batch_metrics(batch: Batch, max_prompt: int, max_response: int, use_critic: bool) -> dict[str, float]:
    """Returns metrics of the step's rows. A row without tokens of the policy is aborted and has no score.

    The length of a response counts the policy's tokens; the length with those of environments is apart if it differs.
    """
    mask = batch.need("mask") != 0
    lengths, prompt_lengths = batch.policy_lengths(), batch.need("prompt_mask").sum(-1)
    answered, scores = lengths > 0, batch.need("scores").sum(-1)
    clipped = lengths >= max_response
    if batch.done is not None:
        clipped |= answered & ~batch.done
    everyone = torch.ones_like(answered)
    metrics = {
        **summary("critic/score", scores, answered),
        "reward/std": variance(scores, answered).sqrt(),
        **summary("critic/rewards", batch.need("rewards").sum(-1), answered),
        **summary("critic/advantages", batch.need("advantages"), mask),
        **summary("critic/returns", batch.need("returns"), mask),
        **length_summary("response_length", lengths, everyone, clipped),
        **length_summary("response_length_non_aborted", lengths, answered, clipped),
        "response/aborted_ratio": mean(~answered, everyone),
        **length_summary("prompt_length", prompt_lengths, everyone, prompt_lengths >= max_prompt),
    }
    if not torch.equal(lengths, batch.need("lengths")):
        metrics |= summary("response_length_with_environment", batch.need("lengths"), everyone)
    if use_critic:
        returns, values = batch.need("returns"), batch.need("values")
        metrics |= summary("critic/values", values, mask)
        metrics["critic/vf_explained_var"] = 1 - variance(returns - values, mask) / (variance(returns, mask) + 1e-5)
    if batch.rollout_log_probs is not None and batch.old_log_probs is not None:
        metrics |= mismatch(batch.old_log_probs, batch.rollout_log_probs, mask)
    return to_floats(metrics) | counted(batch)


@torch.no_grad()
def signal_metrics(batch: Batch) -> dict[str, float]:
    """Returns the share of responses that scored as all others to their prompt did, and whether all prompts are equal.

    With one response to a prompt, each is compared with all others of the step.
    """
    scores, prompts = batch.need("scores").sum(-1), batch.group.unique().numel()
    peers = batch.with_(group=torch.zeros_like(batch.group)) if prompts == len(batch) else batch
    metrics = {ALIKE: (~informative_groups(peers, scores)).double().mean()}
    if prompts > 1 and not any(batch.extras.get("images", ())):
        metrics[SAME_PROMPTS] = (batch.prompts == batch.prompts[:1]).all()
    return to_floats(metrics)


@torch.no_grad()
def age_metrics(batch: Batch, version: int, staleness: int) -> dict[str, float]:
    """Returns how many versions of the weights drew a response, how far the newest and the oldest of them are behind
    `version`, that of the weights which learn from it, and the share of tokens of each age."""
    versions, drawn = batch.need("versions"), batch.need("mask") != 0
    answered = drawn.any(-1)
    newest = versions.masked_fill(~drawn, torch.iinfo(versions.dtype).min).amax(-1)
    oldest = versions.masked_fill(~drawn, torch.iinfo(versions.dtype).max).amin(-1)
    ages = (version - versions[drawn]).bincount(minlength=staleness + 1)
    name = "training/off_policy/trajectory_"
    return to_floats(
        summary(f"{name}spans", newest - oldest + 1, answered)
        | summary(f"{name}staleness", version - newest, answered)
        | summary(f"{name}staleness_worst", version - oldest, answered)
        | {f"{TOKEN_AGE}{age}": count.double() / ages.sum().clamp(min=1) for age, count in enumerate(ages)}
    )


def mismatch(trained: PerToken, sampled: PerToken, mask: Tensor) -> dict[str, Tensor]:
    """Returns ``|p - q|`` of the sampled tokens' probabilities by trainer and rollout engine, and their correlation."""
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


def summary(name: str, x: Tensor, valid: Tensor) -> dict[str, Tensor]:
    wide, empty = x.double(), ~valid.any()
    highest, lowest = wide.masked_fill(~valid, -torch.inf).max(), wide.masked_fill(~valid, torch.inf).min()
    return {
        f"{name}/mean": mean(wide, valid),
        f"{name}/max": highest.masked_fill(empty, 0),
        f"{name}/min": lowest.masked_fill(empty, 0),
    }


def length_summary(name: str, lengths: Tensor, valid: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    return summary(name, lengths, valid) | {f"{name}/clip_ratio": mean(clipped, valid)}


def mean(x: Tensor, valid: Tensor) -> Tensor:
    return masked_sum(x.double(), valid) / valid.sum().clamp(min=1)


def variance(x: Tensor, valid: Tensor) -> Tensor:
    """Returns the unbiased variance; zero for a single value."""
    centred = x.double() - mean(x, valid)
    return masked_sum(centred.square(), valid) / (valid.sum() - 1).clamp(min=1)


def counted(batch: Batch) -> dict[str, float]:
    """Returns turns, tool calls and the seconds of tools a row, means of what went wrong, and why episodes ended."""
    metrics: dict[str, float] = {}
    for column, name in COUNTED.items():
        metrics |= spread(name, [float(value) for value in batch.extras.get(column, ())])
    for name in MEANS:
        if counts := batch.extras.get(name):
            metrics[f"environment/{name}"] = sum(counts) / len(counts)
    ended = list(batch.extras.get("ended", ()))
    return metrics | {f"environment/ended/{why}": ended.count(why) / len(ended) for why in sorted(set(ended))}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Returns the least, the most and the mean of counts; nothing if there are none."""
    if not values:
        return {}
    return {f"{name}/min": min(values), f"{name}/max": max(values), f"{name}/mean": sum(values) / len(values)}


def to_floats(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Converts metrics to floats with one transfer from the device."""
    return dict(zip(metrics, torch.stack([value.double() for value in metrics.values()]).tolist(), strict=True))
