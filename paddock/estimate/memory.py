"""What one GPU holds in every phase of a step, in bytes, from shapes and settings alone.

The formulas, with P parameters of which T are trained, held by s ranks, h hidden, f MLP width, L layers:

    parameters   d P / s          d = 4: the fp32 master copy of FSDP mixed precision; 2 for a frozen bf16 model;
                                  under LoRA c P + d T, one rank alone another c T: the copies that compute, and
                                  with lora.merge c W, the weights beside which adapters stand, with them added
    gradients    d T / s
    optimizer    2 d T / s        AdamW's two moments; fused, so that a step makes no temporary copy
    alone        c P, d T, 3 d T  one rank without FSDP, c < d: weights that compute, gradients, masters and moments
    gathered     c (2 root + 3 layer)   FSDP in an update: the root's weights and gradients, this layer's and the
                                  next one's weights, one layer's gradients, at c = 2 bytes; forward: c (root + 2 layer)
                                  alone c (root + layer): gradients before they are added to those of the masters
    kept         c h L            a token's input to every layer, when layers are recomputed; else L whole layers;
                                  4 h L by the fused forward of one rank alone, whose stream is float32
    layer        c (8h + 2 (q + k) + 4f)   a token's tensors in one layer; q, k: query and key width
    backward     c (2f + 2h)      a token's gradients while one layer runs backward
    forward      c (3f + 4h)      a token's live tensors in a forward without gradients
    logits       16 V chunk, forward 8 V chunk   log-probs are taken `chunk` tokens at a time, never all at once

An update's peak is the larger of two moments: the head (kept + 6h + logits) and a layer (kept + layer + backward).
An image tower that is trained keeps `c width depth` for each patch on top, if every token of a prompt is an image's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from paddock.config.phases import PHASES
from paddock.config.rollout_engines import engine_kind
from paddock.estimate.splits import Fsdp, Megatron, States, share
from paddock.facts.machine import GIB
from paddock.facts.models import ModelShape

LOGITS_CHUNK = 1024
LOGIT_BYTES_UPDATE = 16
LOGIT_BYTES_FORWARD = 8

WITHOUT_GRADIENTS = tuple(phase for phase in PHASES.values() if phase.cut and not phase.updates)
UPDATES = tuple(phase for phase in PHASES.values() if phase.cut and phase.updates)
TRAINED = tuple(phase.role for phase in UPDATES)


@dataclass(frozen=True)
class Hardware:
    """`gpus` equal GPUs in all; none means one process whose device memory is the machine's RAM."""

    gpus: int
    gpus_per_node: int
    memory_bytes: int

    @property
    def margin(self) -> int:
        """Kept free for the CUDA context, communication buffers and fragmentation: 10 %, at least 2 GiB."""
        return max(self.memory_bytes // 10, 2 * GIB)


@dataclass(frozen=True)
class RoleLoad:
    """A model in the step and how it is held. Tokens are those one GPU takes in a micro-batch."""

    shape: ModelShape
    split: Fsdp | Megatron = field(default_factory=Fsdp)
    update_tokens: int = 0
    forward_tokens: int = 0
    dtype_bytes: int = 4
    lora_rank: int = 0
    merges: bool = False
    """True if the role computes by merged weights, which it holds beside its own."""
    checkpointing: bool = True
    activation_offload: bool = False
    """Inputs of layers wait on the host; two of them at a time are on the device."""
    param_offload: bool = False
    optimizer_offload: bool = False
    borrowed: bool = False
    """True if the role runs the actor's weights, with adapters off."""
    frozen_vision: bool = False
    image_share: float = 0.0
    """Tokens of a full row that may be an image's: those of the prompt."""
    others: tuple[ModelShape, ...] = ()
    """Further models of the role, none larger: they rest beside it and work in turn."""

    @property
    def lora_parameters(self) -> int:
        return self.shape.lora_parameters(self.lora_rank)

    @property
    def held_bytes(self) -> int:
        """Bytes per weight, for most weights."""
        return self.split.frozen_bytes if self.lora_rank else self.dtype_bytes

    @cached_property
    def states(self) -> States:
        if self.borrowed:
            return States(0)
        frozen = self.shape.vision_params if self.frozen_vision else 0
        own = self.split.states(self.shape, self.dtype_bytes, self.lora_parameters, frozen)
        more = sum(self.split.states(other, self.dtype_bytes, 0).parameters for other in self.others)
        more += self.merges * self.split.frozen_bytes * self.shape.adapted_parameters
        return replace(own, parameters=own.parameters + more)


@dataclass(frozen=True)
class RolloutLoad:
    """The engine that writes responses: `rows` of them a step, prompt + response tokens each at most."""

    engine: str
    rows: int
    row_tokens: int
    max_sequences: int = 1024
    tensor: int = 1
    memory_fraction: float = 0.5
    ahead: int = 0
    """Batches that are drawn beside the step's own."""
    sleeps: bool = True
    """Gives its memory back while the others work."""
    apart: bool = False
    """True if the rollout has devices of its own."""
    copy: bool = False
    """True if it has weights of its own, in processes of its own."""
    prefill_tokens: int = 0
    """Tokens of prompts that are computed at a time."""
    shared_tokens: int = 0
    """Tokens of a row that are cached once for `sharing` rows: the prompt's, in the embedded engine on a GPU."""
    sharing: int = 1
    validation_rows: int = 0
    """Most responses that a validation asks for at a time."""
    validation_sharing: int = 1
    merges: bool = False
    """True if adapters are added to gathered weights meanwhile."""

    @property
    def asked(self) -> int:
        """Returns the most responses that are asked for at a time."""
        return self.rows * (1 + self.ahead)

    @property
    def external(self) -> bool:
        """Takes its fraction of the memory as one pool, weights included."""
        return engine_kind(self.engine).copies_weights


@dataclass(frozen=True)
class StepLoad:
    hardware: Hardware
    rollout: RolloutLoad
    roles: Mapping[str, RoleLoad]
    """The actor, and the other roles that hold a model, by the names of topology.ROLES."""
    compute_bytes: int = 2
    own_log_probs: bool = True
    """True if the actor computes `old_log_probs` before the update."""

    @cached_property
    def forward_phases(self) -> dict[str, RoleLoad]:
        """Returns the phases without gradients, and the role that works in each."""
        left_out = () if self.own_log_probs else ("old_log_prob",)
        wanted = [phase for phase in WITHOUT_GRADIENTS if phase.name not in left_out]
        return {phase.name: self.roles[phase.role] for phase in wanted if phase.role in self.roles}

    @property
    def actor(self) -> RoleLoad:
        return self.roles["actor"]

    def with_roles(self, **roles: RoleLoad) -> StepLoad:
        """Returns this job with other roles of these names."""
        return replace(self, roles={**self.roles, **roles})


def scalar(role: RoleLoad) -> RoleLoad:
    """Returns a critic or reward model, which answers with one number a token, whatever head its shape has."""
    return replace(role, shape=replace(role.shape, scalar_head=True))


Parts = Mapping[str, int]


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by phase and part on the fullest GPU, and what they leave room for."""

    phases: Mapping[str, Parts]
    hardware: Hardware
    host_bytes: int
    """Offloaded states on one node."""
    kv_tokens: int
    """Tokens the KV cache of one rollout engine holds."""
    kv_sequences: int
    """Responses of full length that one engine writes at once."""

    def total(self, phase: str) -> int:
        return sum(self.phases[phase].values())

    @property
    def limit(self) -> int:
        return self.hardware.memory_bytes - self.hardware.margin

    @property
    def overfull(self) -> tuple[str, ...]:
        """Phases that do not fit; a rollout without room for one full response is one of them."""
        full = [phase for phase in self.phases if self.total(phase) > self.limit]
        starved = ["gen"] if self.kv_sequences == 0 and "gen" not in full else []
        return tuple(starved + full)

    @property
    def fits(self) -> bool:
        return not self.overfull


def estimate(job: StepLoad) -> MemoryPlan:
    """Every phase of the step in the loop's order: what rests on the GPU plus what the phase works with."""
    engine, kv_tokens = rollout_parts(job)
    beside = {} if job.rollout.apart else rest(job, "actor" if shares_weights(job) else None)
    phases = {"gen": beside | engine}
    for name, role in job.forward_phases.items():
        holder = "actor" if role.borrowed else PHASES[name].role
        phases[name] = rest(job, holder, prefetched=PHASES[name].prefetches) | forward_work(job, role)
    for phase in UPDATES:
        if phase.role in job.roles:
            phases[phase.name] = rest(job, phase.role, updating=True) | update_work(job, job.roles[phase.role])
    if not (job.rollout.sleeps or job.rollout.apart):
        pool = {part: engine[part] for part in ("rollout_weights", "kv_cache")}
        phases = {name: parts if name == "gen" else parts | pool for name, parts in phases.items()}
    return MemoryPlan(
        phases={name: {part: size for part, size in parts.items() if size} for name, parts in phases.items()},
        hardware=job.hardware,
        host_bytes=offloaded(job),
        kv_tokens=kv_tokens,
        kv_sequences=kv_tokens // job.rollout.row_tokens,
    )


def rest(job: StepLoad, active: str | None, updating: bool = False, prefetched: str | None = None) -> dict[str, int]:
    """Returns what every role keeps on the GPU while `active` works. Offloaded states come back for their own phase
    only."""
    parts: dict[str, int] = {}
    for name in job.roles:
        states = resident(job, name, name in (active, prefetched), name == active and updating)
        if name == "actor":
            parts |= {"parameters": states.parameters, "gradients": states.gradients, "optimizer": states.optimizer}
        else:
            parts[name] = states.total
    return parts


def resident(job: StepLoad, name: str, active: bool, updating: bool) -> States:
    role, states = job.roles[name], job.roles[name].states
    trained = name in TRAINED
    offloads = job.hardware.gpus > 0  # a CPU run has nowhere to offload to
    weights = active or not (offloads and role.param_offload)
    moments = updating or not (offloads and role.optimizer_offload)
    return States(
        parameters=states.parameters if weights else 0,
        gradients=states.gradients if updating or (trained and role.split.keeps_gradients and weights) else 0,
        optimizer=states.optimizer if trained and moments else 0,
    )


def offloaded(job: StepLoad) -> int:
    """Host bytes of one node: the offloaded states of each of its GPUs."""
    if job.hardware.gpus == 0:
        return 0
    each = 0
    for name, role in job.roles.items():
        each += role.states.host + role.param_offload * role.states.parameters
        each += (role.optimizer_offload and name in TRAINED) * role.states.optimizer
        inputs = share(role.update_tokens, role.split.tensor) * input_bytes(role, job.compute_bytes)
        each += role.activation_offload * inputs * role.shape.layers
    return each * min(job.hardware.gpus, job.hardware.gpus_per_node)


def shares_weights(job: StepLoad) -> bool:
    """The embedded engine runs the actor's own modules; weights split over ranks it must gather first."""
    own = engine_kind(job.rollout.engine).trainer_log_probs and not job.rollout.copy
    return own and job.actor.split.whole


def rollout_parts(job: StepLoad) -> tuple[dict[str, int], int]:
    """The engine's parts, and the tokens its KV cache holds.

    weights    c P / tp; none when the embedded engine shares the actor's
    unmerged   c W, W: weights beside which adapters stand; a copy, to put gathered ones back after a rollout by
               merged ones
    KV cache   external engines take memory fraction x memory, of which the weights are a part; the others what
               full-length responses of a step or a validation ask for, and a group's prompt once if it is shared
    then       embedded and hf: the larger of a prefill (`forward` for each of its tokens) and a decode step's logits,
               8 V bytes a sequence; external engines have them in their pool
    """
    rollout, shape = job.rollout, job.actor.shape
    weights = 0 if shares_weights(job) else share(job.compute_bytes * shape.parameters, rollout.tensor)
    per_token = kv_bytes_per_token(job)
    if rollout.external:
        pool = max(0, int(rollout.memory_fraction * job.hardware.memory_bytes) - weights)
        return {"rollout_weights": weights, "kv_cache": pool}, pool // per_token
    sequences, validated = (min(rows, rollout.max_sequences) for rows in (rollout.asked, rollout.validation_rows))
    cache = per_token * max(
        sequences * cached_tokens(rollout, rollout.sharing),
        validated * cached_tokens(rollout, rollout.validation_sharing),
    )
    work = larger(
        layer=rollout.prefill_tokens * forward_bytes(shape, job.compute_bytes),
        head=0,
        logits=LOGIT_BYTES_FORWARD * shape.vocab * max(sequences, validated),
    )
    unmerged = rollout.merges * job.compute_bytes * shape.adapted_parameters
    parts = {"rollout_weights": weights, "unmerged_weights": unmerged, "kv_cache": cache}
    return parts | work, sequences * rollout.row_tokens


def answers_fit(job: StepLoad) -> bool:
    """True if a rollout fits beside the actor's weights alone, as in a command that does not train."""
    own = job.compute_bytes * job.actor.shape.parameters if shares_weights(job) else 0
    return own + sum(rollout_parts(job)[0].values()) <= job.hardware.memory_bytes - job.hardware.margin


def cached_tokens(rollout: RolloutLoad, sharing: int) -> int:
    """Returns tokens of the KV cache for each full-length response, if `sharing` of them have one prompt."""
    return rollout.row_tokens - rollout.shared_tokens + share(rollout.shared_tokens, sharing)


def kv_bytes_per_token(job: StepLoad) -> int:
    """Returns bytes on one GPU: tensor-parallel ranks share the key heads; each holds a latent cache (no heads)
    whole."""
    rollout, shape = job.rollout, job.actor.shape
    whole = shape.kv_bytes_per_token(job.compute_bytes, latent=rollout.external)
    return whole if shape.kv_lora_rank else share(whole, min(rollout.tensor, shape.kv_heads))


def forward_work(job: StepLoad, role: RoleLoad) -> dict[str, int]:
    """Log-probs, values or scores: the larger of one layer's live tensors and the head's logits."""
    c, shape, split = job.compute_bytes, role.shape, role.split
    tokens = share(role.forward_tokens, split.tensor)
    layer = tokens * forward_bytes(shape, c)
    head = tokens * c * shape.hidden
    logits = logits_bytes(role, role.forward_tokens, LOGIT_BYTES_FORWARD)
    gathered = split.gathered(shape, role.held_bytes, c, updating=False)
    return {"gathered": gathered} | larger(layer, head, logits)


def forward_bytes(shape: ModelShape, compute_bytes: int) -> int:
    """Returns the bytes of one token's live tensors in a forward without gradients."""
    return compute_bytes * (3 * mlp_width(shape) + 4 * shape.hidden)


def update_work(job: StepLoad, role: RoleLoad) -> dict[str, int]:
    """Forward and backward of one micro-batch: `kept` for all layers, then the larger of the head and one layer."""
    c, shape, split = job.compute_bytes, role.shape, role.split
    tokens = share(role.update_tokens, split.tensor)
    one = c * layer_elements(shape)
    kept = tokens * kept_layers(role) * (input_bytes(role, c) if role.checkpointing else one)
    backward = tokens * ((one if role.checkpointing else 0) + c * 2 * (mlp_width(shape) + shape.hidden))
    head = tokens * c * 6 * shape.hidden
    logits = logits_bytes(role, role.update_tokens, LOGIT_BYTES_UPDATE)
    gathered = split.gathered(shape, role.held_bytes, c, updating=not role.lora_rank)  # frozen: without gradients
    images = image_bytes(role, c)
    return {"gathered": gathered, "images": images} | larger(kept + backward, kept + head, logits)


def input_bytes(role: RoleLoad, compute_bytes: int) -> int:
    """Returns the bytes of one token's input to a layer, as checkpointing keeps it; the fused forward's is float32."""
    return (4 if role.split.alone else compute_bytes) * role.shape.hidden


def kept_layers(role: RoleLoad) -> int:
    """Returns how many layers keep their input on the device; if offloaded, one in use and two that are being
    copied."""
    return min(3, role.shape.layers) if role.activation_offload else role.shape.layers


def image_bytes(role: RoleLoad, compute_bytes: int) -> int:
    """Returns what a trained image tower keeps until its turn in the backward pass; not split by tensor parallel
    ranks."""
    shape = role.shape
    if role.frozen_vision or role.lora_rank:
        return 0
    patches = int(role.update_tokens * role.image_share) * shape.vision_patches_per_token
    block = 12 * shape.vision_width + 4 * shape.vision_inner  # as layer_elements, with as many keys as queries
    return patches * shape.vision_depth * compute_bytes * (shape.vision_width if role.checkpointing else block)


def larger(layer: int, head: int, logits: int) -> dict[str, int]:
    """The parts of the fuller moment: logits are gone when a layer runs backward."""
    if layer > head + logits:
        return {"activations": layer, "logits": 0}
    return {"activations": head, "logits": logits}


def logits_bytes(role: RoleLoad, tokens: int, each: int) -> int:
    if role.shape.scalar_head:
        return 0
    return each * min(LOGITS_CHUNK, tokens) * share(role.shape.vocab, role.split.tensor)


def layer_elements(shape: ModelShape) -> int:
    """Numbers autograd keeps of one token in one layer, attention by a fused kernel.

    8h: both norms' inputs in fp32, their normalised form and output. q + k + v + attention output.
    Norms of queries and keys add three times their width; latent attention its two latents, in norm and out.
    """
    if shape.kv_lora_rank:
        query = shape.heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        value = shape.heads * shape.v_head_dim
        attention = 2 * (query + value) + 4 * (shape.q_lora_rank + shape.kv_lora_rank)
    else:
        width = (shape.heads + shape.kv_heads) * shape.head_dim
        attention = (2 + 3 * shape.qk_norm) * width
    return 4 * shape.norms_per_layer * shape.hidden + attention + 4 * expert_width(shape) + 2 * dispatch_width(shape)


def mlp_width(shape: ModelShape) -> int:
    return expert_width(shape) + dispatch_width(shape)


def expert_width(shape: ModelShape) -> int:
    """Returns the MLP columns one token meets in the widest kind of layer."""
    sparse = shape.experts_per_token * shape.moe_intermediate + shape.shared_expert_intermediate
    return max(shape.intermediate if shape.plain_layers else 0, sparse)


def dispatch_width(shape: ModelShape) -> int:
    """A token is copied once for each expert it visits."""
    return shape.experts_per_token * shape.hidden
