"""How long a step takes, from shapes, settings and a device's speed: operations and bytes (counts.py) at the rates that
were reached.

    forward    operations / compute + traffic / bandwidth   traffic: what a layer reads and writes between its products,
                                    and the logits
    update     the same for 2 + r + w forwards of operations and 3 + r of traffic, or the time that the host takes to
                                    launch its layers, if that is longer
    decode     keys and values / bandwidth + products + logits / bandwidth + launches; products: their operations, or
                                    the reading of all weights in each step, if that takes longer
    rollout    a forward of each prompt, and the decode

The constants are fitted to runs on one H200, none of which they miss by 25 % (tests/plan/test_measured_times.py). They
are shares of a device's own figures, and stand for other devices, and for a processor whose figures were measured.

Every response has full length. Communication between devices, idle pipeline stages, transfers to the host, the
optimizer's own step, rewards and validation are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paddock.estimate.counts import (
    Work,
    forward_operations,
    forward_tokens,
    multiplied_weights,
    prompt_operations,
    update_forwards,
)
from paddock.estimate.memory import (
    UPDATES,
    RoleLoad,
    StepLoad,
    estimate,
    kv_bytes_per_token,
    layer_elements,
    shares_weights,
)
from paddock.facts.machine import Speed
from paddock.facts.models import ModelShape

COMPUTE_SHARE = 0.7
"""Share of a device's operations that products reach."""
EXPERTS_COMPUTE_SHARE = 0.35
"""The same for a mixture of experts, whose products are small: assumed, not measured."""
BANDWIDTH_SHARE = 0.92
LAYER_TRAFFIC = 3
"""Times that a pass over a layer moves the tensors that autograd would keep of it (`layer_elements`): norms, rotation
and activation read and write them again."""
ADAPTER_TRAFFIC = 1.3
"""The same of a layer with adapters, relative to one without: their outputs are added to those of each product."""
LOGIT_TRAFFIC = 8
"""Bytes per logit and pass: it is written and read in float32."""
KERNEL_S = 4.5e-6
"""Seconds that a small kernel takes whatever its size: its start and its end."""
LAYER_KERNELS, ADAPTER_KERNELS = 7, 4
"""Kernels of a layer in a decode step, and those that adapters add."""
HOST_LAYER_S = 1.2e-3
"""Seconds in which the host launches one pass over one layer of a micro-batch."""


@dataclass(frozen=True)
class Duration:
    phases: Mapping[str, float]
    """Seconds by phase, in the loop's order."""

    @property
    def step(self) -> float:
        return sum(self.phases.values())


def duration(job: StepLoad, work: Work, speed: Speed) -> Duration:
    return Duration({"gen": rollout_seconds(job, work, speed)} | training_phases(job, work, speed))


def training_phases(job: StepLoad, work: Work, speed: Speed) -> dict[str, float]:
    """Returns the seconds of what follows a rollout: forward passes, then updates."""
    phases = dict[str, float]()
    for phase, role in job.forward_phases.items():
        each = [replace(role, shape=shape) for shape in (role.shape, *role.others)]  # with like shares of the rows
        phases[phase] = sum(forward_seconds(job, one, work, speed) for one in each) / len(each)
    for update in UPDATES:
        if update.role in job.roles:
            phases[update.name] = work.epochs * update_seconds(job, job.roles[update.role], work, speed)
    return phases


def forward_seconds(job: StepLoad, role: RoleLoad, work: Work, speed: Speed) -> float:
    """Seconds of a pass over all rows without gradients."""
    return _passes(job, role, work, speed, forwards=1, passes=1, micro_tokens=role.forward_tokens)


def update_seconds(job: StepLoad, role: RoleLoad, work: Work, speed: Speed) -> float:
    """Seconds of one epoch over all rows: forward and backward, the latter two passes."""
    passes = 3 + role.checkpointing
    return _passes(job, role, work, speed, update_forwards(role), passes, role.update_tokens)


def _passes(
    job: StepLoad, role: RoleLoad, work: Work, speed: Speed, forwards: int, passes: int, micro_tokens: int
) -> float:
    devices = max(1, job.hardware.gpus)
    tokens = forward_tokens(role, work, devices)
    products = forwards * forward_operations(role, work, devices) / (devices * compute_rate(role.shape, speed))
    moved = tokens * layer_traffic(role, job.compute_bytes) + work.written * logit_traffic(role.shape)
    on_device = products + passes * moved / (devices * speed.bandwidth * BANDWIDTH_SHARE)
    if not job.hardware.gpus or not micro_tokens:  # a processor launches nothing ahead of itself
        return on_device
    micro_batches = -(-tokens // (devices * micro_tokens))
    return max(on_device, micro_batches * passes * role.shape.layers * HOST_LAYER_S)


def compute_rate(shape: ModelShape, speed: Speed) -> float:
    """Operations a second of one device."""
    return speed.flops * (EXPERTS_COMPUTE_SHARE if shape.experts else COMPUTE_SHARE)


def layer_traffic(role: RoleLoad, compute_bytes: int) -> float:
    """Bytes that one token moves in a pass over all layers."""
    adapters = ADAPTER_TRAFFIC if role.lora_rank and not role.merges else 1
    return LAYER_TRAFFIC * adapters * role.shape.layers * compute_bytes * layer_elements(role.shape)


def logit_traffic(shape: ModelShape) -> int:
    return 0 if shape.scalar_head else LOGIT_TRAFFIC * shape.vocab


@dataclass(frozen=True)
class Pace:
    """Holds the seconds that a rollout engine takes for each part of its work."""

    actor: RoleLoad
    compute: float
    """Operations a second."""
    moved: float
    """Seconds in which a prompt's token is moved through all layers."""
    weights: float
    """Seconds in which a decode step reads all weights."""
    products: float
    """Seconds in which a token is multiplied with the weights."""
    logits: float
    """Seconds in which the logits of a token are moved."""
    key: float
    """Seconds in which a key and its value are read."""
    launches: float
    """Seconds in which the kernels of a decode step are launched."""

    @staticmethod
    def of(job: StepLoad, speed: Speed) -> Pace:
        rollout = job.rollout
        actor = replace(job.actor, lora_rank=0) if rollout.merges or job.actor.merges else job.actor
        ways = 1 if shares_weights(job) else rollout.tensor
        compute, bandwidth = ways * compute_rate(actor.shape, speed), speed.bandwidth * BANDWIDTH_SHARE
        kernels = LAYER_KERNELS + (ADAPTER_KERNELS if actor.lora_rank else 0)
        return Pace(
            actor,
            compute,
            moved=layer_traffic(actor, job.compute_bytes) / (ways * bandwidth),
            weights=job.compute_bytes * actor.shape.parameters / (ways * bandwidth),
            products=2 * multiplied_weights(actor) / compute,
            logits=logit_traffic(actor.shape) / (ways * bandwidth),
            key=kv_bytes_per_token(job) / bandwidth,
            launches=actor.shape.layers * kernels * KERNEL_S,
        )

    def prefill(self, tokens: int) -> float:
        """Returns the seconds of a prompt."""
        return prompt_operations(self.actor, Work(1, 1, tokens, 0)) / self.compute + tokens * self.moved

    def decode(self, steps: float, tokens: float, keys: float) -> float:
        """Returns the seconds of decode steps that write so many tokens and read so many keys, of equally many
        responses each."""
        products = max(steps * self.weights, tokens * self.products)
        return keys * self.key + products + tokens * self.logits + steps * self.launches


def rollout_seconds(job: StepLoad, work: Work, speed: Speed) -> float:
    """Seconds of the fullest engine: its prompts, then its decode steps, as many as the cache's room asks for."""
    rollout, pace = job.rollout, Pace.of(job, speed)
    part = rollout.rows / work.rows  # of the step's rows
    together = max(1, min(rollout.rows, rollout.max_sequences, estimate(job).kv_sequences))
    steps = max(work.response_tokens, part * work.written / together)
    prompts = part * work.prompts * pace.prefill(work.prompt_tokens)
    return prompts + pace.decode(steps, part * work.written, part * work.keys)
