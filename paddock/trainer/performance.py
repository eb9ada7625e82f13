"""What a step cost: tokens a second, memory, the share of the devices' peak, and how evenly ranks were loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from paddock.config.phases import PHASES
from paddock.config.roles import ActorRolloutRefConfig, CriticConfig
from paddock.core.batch import Batch
from paddock.core.device import memory_in_use
from paddock.core.timing import Timer
from paddock.facts.machine import GIB, GPU_SPEED
from paddock.facts.models import ModelShape, shape_of
from paddock.models.packing import sequence_lengths
from paddock.workers.role import Role
from paddock.workers.roles import Roles
from paddock.workers.sharded import ShardedRole

SHORTEST = 1e-3
"""Seconds: a phase that took less was not computed."""


class Performance:
    """Measures the steps of a run: throughput, memory, MFU and balance."""

    def __init__(self, group: ActorRolloutRefConfig, critic: CriticConfig, roles: Roles):
        self.group, self.critic, self.roles = group, critic, roles
        self.device_name = roles.actor.device_name()
        self.actor_shape = shape_of(group.model.path or "")
        critic_shape = shape_of(critic.model.path or "") if roles.critic else None
        self.critic_shape = critic_shape and replace(critic_shape, scalar_head=True)

    def metrics(self, batch: Batch, timer: Timer) -> dict[str, float]:
        """Returns the cost of the step that trained on this batch."""
        lengths, (responses, tokens) = sequence_lengths(batch), token_counts(batch)
        speed = throughput_metrics(tokens, timer.seconds["step"], self.roles.devices, self.roles.memory())
        balance = balance_metrics(lengths, self.roles.actor.shares_of(batch))
        return timing_metrics(timer, responses, tokens) | speed | balance | self.utilisation(lengths, timer)

    def utilisation(self, lengths: list[int], timer: Timer) -> dict[str, float]:
        """Returns MFU per role. Counts all tokens of all rows, also of shared prompts; empty if the device's peak is
        unknown."""
        actor, critic, epochs = self.roles.actor, self.roles.critic, self.group.actor.ppo_epochs
        phases: list[tuple[str, str, Role | ShardedRole, ModelShape | None, int]] = [
            ("actor", "update_actor", actor, self.actor_shape, epochs),
            ("actor_infer", "old_log_prob", actor, self.actor_shape, 1),
        ]
        if critic:
            phases.append(("critic", "update_critic", critic, self.critic_shape, self.critic.ppo_epochs))
        shares = {}
        for name, phase, role, shape, times in phases:
            seconds, backward = timer.seconds.get(phase, 0.0), phase.startswith("update")
            if shape is not None and seconds >= SHORTEST:
                share = mfu(shape, lengths * times, seconds, role.devices, self.device_name, backward=backward)
                shares[f"perf/mfu/{name}"] = share
        return {name: share for name, share in shares.items() if share is not None}


def balance_metrics(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Returns the tokens per rank: had the rows been cut in order, and with `parts` (row indices for each rank)."""
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
    """Returns the number of tokens that the policy wrote, and of all tokens of prompts and responses."""
    everything = batch.need("lengths").sum() + batch.need("prompt_mask").sum()
    written, all_tokens = torch.stack([batch.policy_lengths().sum(), everything]).long().tolist()
    return written, all_tokens


def throughput_metrics(
    tokens: int, seconds: float, devices: int, memory: tuple[int, int] | None = None
) -> dict[str, float]:
    """Returns tokens per second and memory. `memory`: peak bytes of a device, allocated and reserved; None on a CPU."""
    metrics = {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * devices),
        "perf/cpu_memory_used_gb": memory_in_use(torch.device("cpu")) / GIB,
    }
    if memory is not None:
        allocated, reserved = memory
        metrics |= {"perf/max_memory_allocated_gb": allocated / GIB, "perf/max_memory_reserved_gb": reserved / GIB}
    return metrics


def mfu(
    shape: ModelShape, lengths: Iterable[int], seconds: float, devices: int, device_name: str, *, backward: bool = True
) -> float | None:
    """Returns the model FLOPs utilisation: operations needed over the devices' peak; None for an unknown device."""
    peak = peak_flops(device_name)
    return None if peak is None else model_flops(shape, lengths, backward) / (seconds * devices * peak)


def model_flops(shape: ModelShape, lengths: Iterable[int], backward: bool = True) -> float:
    """``2 N T + 2 L d sum s^2`` forward (matrices, causal attention), twice that backward.  arXiv:2204.02311, app. B

    N counts the parameters in matrix products: the input embedding is a table, unless the head shares it.
    """
    lengths = list(lengths)
    products = 2 * shape.multiplied_parameters * sum(lengths)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * sum(length**2 for length in lengths)
    return float((products + attention) * (3 if backward else 1))


def peak_flops(device_name: str) -> float | None:
    """Returns the speed of the GPU whose words the device's name has: `h100-pcie` before `h100`."""
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    known = [name for name in GPU_SPEED if words.issuperset(name.split("-"))]
    return GPU_SPEED[max(known, key=len)].flops if known else None


def timing_metrics(timer: Timer, response_tokens: int, all_tokens: int) -> dict[str, float]:
    """Returns ``timing_s/*``, and ``timing_per_token_ms/*`` by the tokens that each phase works on."""
    counts = {"responses": response_tokens, "all": all_tokens}
    metrics = {f"timing_s/{name}": seconds for name, seconds in timer.seconds.items()}
    for phase in PHASES.values():
        if phase.name in timer.seconds and (tokens := counts.get(phase.by_tokens)):
            metrics[f"timing_per_token_ms/{phase.name}"] = 1000 * timer.seconds[phase.name] / tokens
    return metrics
