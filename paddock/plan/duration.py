"""How long a step takes, from shapes, settings and a device's speed: an order of magnitude, before any run.

    token      2 N + 2 L s q        floating-point operations of one token's forward pass: N weights it is multiplied
                                    with, and a causal mean of s / 2 keys of width q in each of L layers
    update     (2 + r + w) x token  forward and its input gradients; r: again where layers are recomputed, w: weight
                                    gradients, which adapters do without
    decode     weights + keys and values of all sequences in flight, read once for every token they write
    prefill    token x prompts      a group's prompt is computed once

Every response has full length. Communication between devices, idle pipeline stages, transfers to the host, rewards and
validation are not counted. The shares of a device's figures that are reached are measured on one H200
(docs/performance.md), and hold for a processor whose own figures were measured; for a mixture of experts, whose
products are small, half of that is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paddock.config.memory.model import (
    FORWARD_PHASES,
    UPDATE_PHASES,
    Job,
    Role,
    estimate,
    kv_bytes_per_token,
    shares_weights,
)
from paddock.facts.machine import Speed
from paddock.facts.models import ModelShape

COMPUTE_SHARE = 0.4
EXPERTS_COMPUTE_SHARE = 0.2
BANDWIDTH_SHARE = 0.8
DECODE_OVERHEAD_S = 0.002
"""What a decode step costs beside its reads: launches, sampling, scheduling."""


@dataclass(frozen=True)
class Work:
    """A step's rows."""

    prompts: int
    responses: int
    prompt_tokens: int
    response_tokens: int
    epochs: int = 1
    own_log_probs: bool = True
    """The actor computes them anew before the update."""

    @property
    def rows(self) -> int:
        return self.prompts * self.responses

    @property
    def row_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class Duration:
    phases: Mapping[str, float]
    """Seconds by phase, in the loop's order."""

    @property
    def step(self) -> float:
        return sum(self.phases.values())


def duration(job: Job, work: Work, speed: Speed) -> Duration:
    devices = max(1, job.hardware.gpus)
    tokens = work.rows * work.row_tokens
    phases = {"rollout": rollout_seconds(job, work, speed)}
    for phase, name in FORWARD_PHASES.items():
        role = job.roles.get(name)
        if role is not None and (phase != "log_probs" or work.own_log_probs):
            each = [replace(role, shape=shape) for shape in (role.shape, *role.others)]  # with like shares of the rows
            times = [token_operations(one, work) / rate(one.shape, speed, devices) for one in each]
            phases[phase] = tokens * sum(times) / len(times)
    for phase, name in UPDATE_PHASES.items():
        role = job.roles.get(name)
        if role is not None:
            passes = 2 + role.checkpointing + (role.lora_rank == 0)
            operations = work.epochs * tokens * passes * token_operations(role, work)
            phases[phase] = operations / rate(role.shape, speed, devices)
    return Duration(phases)


def rate(shape: ModelShape, speed: Speed, devices: int) -> float:
    """Operations a second of all devices together."""
    return devices * speed.flops * (EXPERTS_COMPUTE_SHARE if shape.experts else COMPUTE_SHARE)


def token_operations(role: Role, work: Work) -> float:
    return 2 * multiplied_weights(role) + 2 * role.shape.layers * work.row_tokens * attention_width(role.shape)


def multiplied_weights(role: Role) -> float:
    """Active ones, without the table that is only looked up; a tower's for each patch of the tokens that are images."""
    shape = role.shape
    looked_up = 0 if shape.tied_embeddings and not shape.scalar_head else shape.vocab * shape.hidden
    tower = shape.vision_params * (role.image_share * shape.vision_patches_per_token - 1)
    return shape.active_parameters - looked_up + tower


def attention_width(shape: ModelShape) -> float:
    if shape.kv_lora_rank:
        return shape.heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim) / 2
    return shape.heads * shape.head_dim


def rollout_seconds(job: Job, work: Work, speed: Speed) -> float:
    """Prefill, then as many decode steps as tokens, again for each load of sequences the cache can hold."""
    rollout, shape = job.rollout, job.actor.shape
    devices = max(1, job.hardware.gpus)
    prefill = work.prompts * work.prompt_tokens * token_operations(job.actor, work) / rate(shape, speed, devices)
    together = max(1, min(rollout.rows, rollout.max_sequences, estimate(job).kv_sequences))
    ways = 1 if shares_weights(job) else rollout.tensor
    context = work.prompt_tokens + work.response_tokens / 2
    reads = job.compute_bytes * shape.parameters / ways + together * context * kv_bytes_per_token(job)
    products = 2 * multiplied_weights(job.actor) * together / rate(shape, speed, ways)
    step = max(reads / (speed.bandwidth * BANDWIDTH_SHARE), products) + DECODE_OVERHEAD_S
    return prefill + work.response_tokens * max(1.0, rollout.rows / together) * step
