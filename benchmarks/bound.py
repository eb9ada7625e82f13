"""Bounds of the phases of a step, in seconds: bytes and operations, as `paddock plan` counts them
(paddock/estimate/counts.py), at the figures of the device's data sheet.

    prefill    operations of the prompts, once each
    decode     the larger of bytes (all weights in each step; keys and values, a prompt's once for all its responses, as
               if these were equally long) and operations
    update     operations of forward and backward, with those of the recomputed forward if layers are checkpointed
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from paddock.estimate.counts import Work, forward_operations, prompt_operations, response_operations
from paddock.estimate.counts import update_forwards as forwards_of
from paddock.estimate.memory import RoleLoad
from paddock.facts.machine import GPU_SPEED, Speed
from paddock.facts.processor import processor_speed

BF16 = 2
"""Bytes of a weight, a key or a value."""


@dataclass(frozen=True)
class Bound:
    """Seconds."""

    prefill: float
    decode: float
    update: float

    @property
    def rollout(self) -> float:
        return self.prefill + self.decode

    @property
    def step(self) -> float:
        return self.rollout + self.update


def bound(role: RoleLoad, work: Work, speed: Speed) -> Bound:
    """Returns the bound of one device that has all rows in flight at once. A prompt's forward draws the first token of
    its responses; decode steps draw the others."""
    others = replace(work, response_tokens=work.response_tokens - 1, lengths=tuple(n - 1 for n in work.lengths))
    weights = others.response_tokens * BF16 * role.shape.parameters
    token = role.shape.kv_bytes_per_token(BF16)
    shared = others.written * others.prompt_tokens * (1 - 1 / others.responses)
    read = weights + others.keys * token - shared * token
    return Bound(
        prefill=prompt_operations(role, work) / speed.flops,
        decode=max(read / speed.bandwidth, response_operations(role, others) / speed.flops),
        update=forwards_of(role) * forward_operations(role, work) / speed.flops,
    )


def speed_of(device: torch.device, threads: int = 1) -> Speed:
    """Returns a GPU's figures by its data sheet, those of a processor's threads as measured."""
    if device.type == "cpu":
        found = processor_speed(threads, bf16=True)
    else:
        words = re.split(r"[^a-z0-9]+", torch.cuda.get_device_name(device).lower())
        found = next((GPU_SPEED[word] for word in words if word in GPU_SPEED), None)
    if found is None:
        raise SystemExit(f"the speed of this {device.type} is not known: add it to paddock/facts/machine.py")
    return found
