"""Advice on a resolved run, by the rules of the RLOO guide. A value that the rules allow is passed over in silence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paddock.config.phases import CUTS
from paddock.config.roles import ActorRolloutRefConfig
from paddock.config.schema import AlgorithmConfig
from paddock.config.topology import ROLES, trains_adapters
from paddock.estimate.memory import GIB, TRAINED, MemoryPlan, StepLoad, estimate
from paddock.estimate.splits import Fsdp, Megatron
from paddock.plan.arithmetic import BatchPlan

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
N_KEY = f"{ROLLOUT}.n"
LR_KEY = f"{ACTOR}.optim.lr"
KL_KEY = "algorithm.kl_ctrl.kl_coef"
TEST_KEY = "trainer.test_freq"
FRACTION_KEY = f"{ROLLOUT}.gpu_memory_utilization"
SEQUENCES_KEY = f"{ROLLOUT}.max_num_seqs"
TENSOR_KEY = f"{ROLLOUT}.tensor_model_parallel_size"

FEWEST = 4
SFT_RATES = (1e-6, 5e-6)
BASE_RATES = (5e-6, 1e-5)
CAUTIOUS_RATE = 5e-7  # the guide's own for hard data and for unstable runs
KL_RANGE = (0.0001, 0.005)  # aggressive from 0.0001 to 0.0005, conservative from 0.001 to 0.005
CRITIC_N = 4
WARMUP_RATIO = 0.03
MOST_NODES = 1024
LORA_KEY = "actor_rollout_ref.model.lora_rank"
LORA_RANK = 64
MERGE_KEY = "actor_rollout_ref.model.lora.merge"
MERGING_SAVES = "4 to 12 %"
"""Merged rows of docs/curves/speed.jsonl beside those of the same adapters beside the weights."""
TUNED = {"instruct", "chat", "it", "sft", "dpo", "rlhf", "thinking", "distill"}
RAW = {"base", "pt"}
RAW_UNLESS_TUNED = re.compile(r"(qwen1\.5|qwen2|qwen2\.5|meta|llama|mistral|gemma|smollm2|glm|moonlight)-")


@dataclass(frozen=True)
class Advice:
    key: str
    message: str
    suggestion: str
    """Overrides to add to the command line."""


@dataclass(frozen=True)
class Facts:
    """What is known of a run: sections of its config, and what follows from all of it."""

    group: ActorRolloutRefConfig
    algorithm: AlgorithmConfig
    batch: BatchPlan
    needs: frozenset[str]
    """What the estimator needs beside rewards."""
    critic: bool
    billions: float | None
    """Parameters of the actor; None where its shape is not known."""
    test_freq: int
    """Steps from one validation to the next; none follow if it is below 1."""
    cut_by_rows: frozenset[str]
    """Phases whose micro-batches are a number of rows; a token budget cuts the others."""
    job: StepLoad | None
    """None where the model's shape is not known."""
    merged: StepLoad | None
    """The job with `lora.merge`, as it would be; None if it merges already, or if rollouts would not gain by it."""


def advise(facts: Facts) -> list[Advice]:
    rules = (responses, learning_rate, warmup, kl_coefficient, double_kl, validation, memory, merged_adapters)
    return [advice for rule in rules for advice in rule(facts)]


def n_range(billions: float) -> tuple[int, int]:
    """Small models vary more and need more samples: below 3B 8-16, to 10B 5-8, beyond 4-6."""
    return (8, 16) if billions < 3 else (5, 8) if billions <= 10 else (4, 6)


def recommended_n(billions: float) -> int:
    """n = max(4, 32 / size in B), within the range for that size."""
    low, high = n_range(billions)
    return min(max(FEWEST, round(32 / billions), low), high)


def responses(facts: Facts) -> Iterator[Advice]:
    n, estimator, grouped = facts.group.rollout.n, facts.algorithm.adv_estimator, "groups" in facts.needs
    if facts.critic and not grouped and n > CRITIC_N:
        message = f"n={n}: with a critic as baseline 1 to {CRITIC_N} responses a prompt are enough"
        yield Advice(N_KEY, message, f"{N_KEY}={CRITIC_N}")
    if not grouped:
        return
    if facts.billions is None:
        if n < FEWEST:
            message = f"n={n}: below {FEWEST} responses a prompt the baseline of {estimator} is too noisy"
            yield Advice(N_KEY, message, f"{N_KEY}={FEWEST}")
        return
    low, high = n_range(facts.billions)
    best, size = recommended_n(facts.billions), f"{facts.billions:.1f}B"
    if n < low:
        noisy = f"; below {FEWEST} the baseline of {estimator} is too noisy" if n < FEWEST else ""
        message = f"n={n} is few for {size}: {low} to {high} responses a prompt keep the variance low{noisy}"
        yield Advice(N_KEY, message, f"{N_KEY}={best}")
    elif n > high:
        message = f"n={n} is many for {size}: beyond {low} to {high} it pays only where rewards vary a lot"
        yield Advice(N_KEY, message, f"{N_KEY}={high}")


def is_tuned(model_name: str) -> bool | None:
    """True if the model's name says that it is instruction-tuned, False if it is not; None if the name does not
    tell."""
    name = model_name.rstrip("/").rsplit("/", 1)[-1].lower()
    words = set(re.split(r"[-_ ]+", name))
    if words & TUNED:
        return True
    if words & RAW or RAW_UNLESS_TUNED.match(name):
        return False
    return None


def learning_rate(facts: Facts) -> Iterator[Advice]:
    """1e-6 to 5e-6 from a tuned model, 5e-6 to 1e-5 from a base model. Adapters take more."""
    if trains_adapters(facts.group):
        return
    tuned, lr = is_tuned(facts.group.model.path or ""), facts.group.actor.optim.lr
    low, high = {True: SFT_RATES, False: BASE_RATES, None: (SFT_RATES[0], BASE_RATES[1])}[tuned]
    start = {True: "a tuned model", False: "a base model", None: "this model"}[tuned]
    floor = low if tuned is False else CAUTIOUS_RATE
    if floor <= lr <= high:
        return
    side, nearest = ("low", low) if lr < floor else ("high", high)
    message = f"lr={lr:g} is {side} for {start}: {low:g} to {high:g} is the guide's range"
    yield Advice(LR_KEY, message, f"{LR_KEY}={nearest:g}")


def warmup(facts: Facts) -> Iterator[Advice]:
    optim, total_steps = facts.group.actor.optim, facts.batch.total_steps
    if optim.lr_warmup_steps > 0 or optim.lr_warmup_steps_ratio > 0:
        return
    key = f"{LR_KEY}_warmup_steps"
    message = "the first step takes the full learning rate: a linear warm-up is advised"
    if total_steps is None:
        yield Advice(key, message, f"{key}_ratio={WARMUP_RATIO}")
    else:
        yield Advice(key, message, f"{key}={max(1, round(WARMUP_RATIO * total_steps))}")


def kl_coefficient(facts: Facts) -> Iterator[Advice]:
    (low, high), coefficient = KL_RANGE, facts.algorithm.kl_ctrl.kl_coef
    if not facts.algorithm.use_kl_in_reward or low <= coefficient <= high:
        return
    if coefficient <= 0:
        message = (
            "algorithm.use_kl_in_reward=True with a coefficient of 0 penalises nothing, and no reference is loaded"
        )
        yield Advice(KL_KEY, message, f"{KL_KEY}=0.001")
        return
    kind, nearest = "weaker than the aggressive range, 0.0001 to 0.0005", low
    if coefficient > high:
        kind, nearest = "stronger than the conservative range, 0.001 to 0.005", high
    yield Advice(KL_KEY, f"kl_coef={coefficient:g} is {kind}", f"{KL_KEY}={nearest:g}")


def double_kl(facts: Facts) -> Iterator[Advice]:
    actor, in_reward = facts.group.actor, facts.algorithm.kl_ctrl.kl_coef
    if facts.algorithm.use_kl_in_reward and in_reward > 0 and actor.use_kl_loss and actor.kl_loss_coef > 0:
        message = (
            f"KL is penalised twice, in the reward with {in_reward:g} and in the loss with {actor.kl_loss_coef:g}: "
            "training may become too conservative"
        )
        key = "actor_rollout_ref.actor.use_kl_loss"
        yield Advice(key, message, f"{key}=False")


def validation(facts: Facts) -> Iterator[Advice]:
    """Steps, not epochs: said where the number could be meant as epochs, or is never reached."""
    per_epoch, total, every = facts.batch.steps_per_epoch, facts.batch.total_steps, facts.test_freq
    if every <= 0 or not per_epoch or not total:
        return
    if every > total:
        message = f"test_freq={every} counts steps and the run has {total}: only the last one validates"
        yield Advice(TEST_KEY, message, f"{TEST_KEY}={min(per_epoch, total)}")
    elif every * per_epoch <= total and every % per_epoch:
        message = (
            f"test_freq={every} counts steps, not epochs: at {per_epoch} steps an epoch it validates every "
            f"{every / per_epoch:.2g} epochs, {total // every} times in all; every {every} epochs are "
            f"{every * per_epoch} steps"
        )
        yield Advice(TEST_KEY, message, f"{TEST_KEY}={every * per_epoch}")


@dataclass(frozen=True)
class Change:
    """A setting that takes less memory."""

    job: StepLoad
    key: str
    what: str
    overrides: str


Step = Callable[[StepLoad], Change | None]


def memory(facts: Facts) -> Iterator[Advice]:
    """Yields what makes a run fit that does not: the guide's steps in its order, each only where it is needed. If they
    do not suffice to train all weights, adapters with the steps that these need are named instead."""
    if facts.job is None or estimate(facts.job).fits:
        return
    steps = list(changes(facts.job, needed_steps(facts.job, facts.cut_by_rows)))
    smallest = steps[-1].job if steps else facts.job
    plan = estimate(smallest)
    adapters = [] if plan.fits else adapters_that_fit(facts.job, facts.cut_by_rows)
    job = facts.job
    for change in adapters or steps:
        yield Advice(change.key, f"{change.what}: {effect(estimate(job), estimate(change.job))}", change.overrides)
        job = change.job
    if not plan.fits:
        yield from last_resorts(smallest)
    key, size = "data.train_batch_size", facts.batch.prompts
    message = f"a smaller batch than {size} saves nothing: the peak follows the micro-batch, not the number of prompts"
    yield Advice(key, message, f"{key}={size}, as it is")


def merged_adapters(facts: Facts) -> Iterator[Advice]:
    """Yields advice to merge adapters where the memory has room for a copy of the weights that they stand beside."""
    if facts.job is None or facts.merged is None:
        return
    before, after = estimate(facts.job), estimate(facts.merged)
    if not (before.fits and after.fits):
        return
    copied = after.phases["update_actor"]["parameters"] - before.phases["update_actor"]["parameters"]
    message = (
        f"beside the weights, adapters cost {MERGING_SAVES} of a step (measured on an H200, 135M to 7B); merged into a "
        f"copy of them, {copied / GIB:.1f} GiB, they cost none, but bf16 rounds small changes away until they add up"
    )
    yield Advice(MERGE_KEY, message, f"{MERGE_KEY}=True")


def adapters_that_fit(job: StepLoad, cut_by_rows: frozenset[str]) -> list[Change]:
    """LoRA, and the steps with which it fits these devices; empty if it does not."""
    if job.actor.lora_rank:
        return []
    adapted = {name: replace(role, lora_rank=LORA_RANK) for name, role in job.roles.items() if name in TRAINED}
    borrowed = {name: replace(role, borrowed=True) for name, role in job.roles.items() if name == "reference"}
    changed = job.with_roles(**adapted, **borrowed)
    what = "with LoRA, whose adapters alone have gradients and moments"
    keys = [LORA_KEY, *(["critic.model.lora_rank"] if "critic" in adapted else [])]
    lora = Change(changed, LORA_KEY, what, " ".join(f"{key}={LORA_RANK}" for key in keys))
    steps = [lora, *changes(changed, needed_steps(changed, cut_by_rows))]
    return steps if estimate(steps[-1].job).fits else []


def needed_steps(job: StepLoad, cut_by_rows: frozenset[str]) -> list[Step]:
    """The steps, less the slow ones (host transfers, tensor parallel) that the others make unnecessary."""
    offloads = [partial(offload, name) for name in job.roles]
    micro_batches = [partial(micro_batch, phase, phase in cut_by_rows) for phase in CUTS]
    steps: list[Step] = [fraction, *offloads, checkpointing, *micro_batches, tensor_parallel, fraction]
    for slow in (*offloads, tensor_parallel):
        fewer = [step for step in steps if step is not slow]
        last = [job, *(change.job for change in changes(job, fewer))][-1]
        steps = fewer if estimate(last).fits else steps
    return steps


def changes(job: StepLoad, steps: list[Step]) -> Iterator[Change]:
    """Yields what each step that lowers the excess changes, on top of those before it."""
    for step in steps:
        change = step(job)
        if change is not None and excess(estimate(change.job)) < excess(estimate(job)):
            yield change
            job = change.job


def excess(plan: MemoryPlan) -> int:
    """Bytes over the limit in all phases; a rollout without room for one response counts as one GiB."""
    over = sum(max(0, plan.total(phase) - plan.limit) for phase in plan.phases)
    return over + (GIB if plan.kv_sequences == 0 else 0)


def effect(before: MemoryPlan, after: MemoryPlan) -> str:
    """Returns the overfull phase that gains most, before and after."""
    if before.kv_sequences == 0 and after.kv_sequences > 0:
        return f"the KV cache then holds {after.kv_sequences} full responses, not none"
    phase = max(before.overfull, key=lambda name: before.total(name) - after.total(name))
    return (
        f"{phase} takes {after.total(phase) / GIB:.1f} GiB instead of {before.total(phase) / GIB:.1f}, "
        f"of {after.limit / GIB:.1f} usable"
    )


def fraction(job: StepLoad) -> Change | None:
    """The largest share of memory, in steps of 0.05, with which the rollout fits beside what rests on the GPU. An
    engine that takes no share gets fewer sequences."""
    if "gen" not in estimate(job).overfull:
        return None
    if not job.rollout.external:
        return sequences(job)
    for twentieths in range(18, 1, -1):
        share = twentieths / 20
        changed = replace(job, rollout=replace(job.rollout, memory_fraction=share))
        if "gen" not in estimate(changed).overfull:
            side = "high" if share < job.rollout.memory_fraction else "low"
            what = (
                f"gpu_memory_utilization={job.rollout.memory_fraction:g} is too {side} beside what training keeps there"
            )
            return Change(changed, FRACTION_KEY, what, f"{FRACTION_KEY}={share:g}")
    return None


def sequences(job: StepLoad) -> Change | None:
    """Half the sequences at a time until the rollout fits, or one is left."""
    before = count = min(job.rollout.asked, job.rollout.max_sequences)
    changed = job
    while count > 1 and "gen" in estimate(changed).overfull:
        count //= 2
        changed = replace(job, rollout=replace(job.rollout, max_sequences=count))
    what = f"with {count} sequences at a time, not {before}"
    return None if count == before else Change(changed, SEQUENCES_KEY, what, f"{SEQUENCES_KEY}={count}")


def offload(name: str, job: StepLoad) -> Change | None:
    """Keep a role's states in host memory while it is idle."""
    role, trained = job.roles[name], name in TRAINED
    wanted = {"param_offload": True, "optimizer_offload": trained}
    flags = [flag for flag, useful in wanted.items() if useful and not getattr(role, flag)]
    if not flags or job.hardware.gpus == 0:
        return None
    kind = ROLES[name]
    section = kind.fsdp if isinstance(role.split, Fsdp) else f"{kind.section}.megatron"
    changed = replace(role, param_offload=True, optimizer_offload=trained or role.optimizer_offload)
    overrides = " ".join(f"{section}.{flag}=True" for flag in flags)
    return Change(
        job.with_roles(**{name: changed}),
        f"{section}.{flags[0]}",
        f"with the idle {name.replace('_', ' ')} on the host",
        overrides,
    )


def checkpointing(job: StepLoad) -> Change | None:
    if job.actor.checkpointing:
        return None
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    changed = job.with_roles(actor=replace(job.actor, checkpointing=True))
    return Change(changed, key, "with activations recomputed, not kept", f"{key}=True")


def micro_batch(phase: str, cut_by_rows: bool, job: StepLoad) -> Change | None:
    """Half the rows or tokens until the phase fits or one row is left: halves go on dividing the mini-batch."""
    cut = CUTS[phase]
    if phase not in estimate(job).overfull:
        return None
    row = job.rollout.row_tokens
    unit, key = (row, cut.rows_key) if cut_by_rows else (1, cut.tokens_key)
    before = getattr(job.roles[cut.role], cut.field) // unit
    size, changed = before, job
    while size * unit >= 2 * row and phase in estimate(changed).overfull:
        size //= 2
        tokens: dict[str, Any] = {cut.field: size * unit}
        changed = job.with_roles(**{cut.role: replace(job.roles[cut.role], **tokens)})
    counted = f"rows of {row} tokens" if cut_by_rows else "tokens"
    return Change(changed, key, f"with {size} {counted} a micro-batch, not {before}", f"{key}={size}")


def tensor_parallel(job: StepLoad) -> Change | None:
    """Twice the GPUs to hold one copy of the engine's weights."""
    ways = 2 * job.rollout.tensor
    if not job.rollout.external or ways > job.hardware.gpus_per_node or job.actor.shape.heads % ways:
        return None
    changed = replace(job, rollout=replace(job.rollout, tensor=ways, rows=2 * job.rollout.rows))
    return Change(changed, TENSOR_KEY, f"with the engine's weights over {ways} GPUs", f"{TENSOR_KEY}={ways}")


def last_resorts(job: StepLoad) -> Iterator[Advice]:
    """Yields advice for a run that none of the settings makes fit."""
    plan = estimate(job)
    nodes = nodes_that_fit(job)
    if nodes is not None:
        message = f"all parameters can be trained on {nodes} nodes of {job.hardware.gpus_per_node} such GPUs"
        yield Advice("trainer.nnodes", message, f"trainer.nnodes={nodes}")
    phase = plan.overfull[0]
    needs = f"{phase} needs {plan.total(phase) / GIB:.1f} GiB of {plan.limit / GIB:.1f} usable"
    message = f"to train all weights, {needs} with every setting that saves memory"
    yield Advice("actor_rollout_ref.model.path", message, "a smaller model, or devices with more memory")


def nodes_that_fit(job: StepLoad) -> int | None:
    """Twice the nodes until all phases fit, as far as states shared by all ranks shrink with their number.

    None on a machine with one GPU: who has one card has no cluster of such machines.
    """
    if job.hardware.gpus_per_node < 2:
        return None
    while job.hardware.gpus // job.hardware.gpus_per_node < MOST_NODES:
        roles = {name: replace(role, split=doubled(role.split, job.hardware.gpus)) for name, role in job.roles.items()}
        job = replace(job.with_roles(**roles), hardware=replace(job.hardware, gpus=2 * job.hardware.gpus))
        if estimate(job).fits:
            return job.hardware.gpus // job.hardware.gpus_per_node
    return None


def doubled(split: Fsdp | Megatron, gpus: int) -> Fsdp | Megatron:
    if isinstance(split, Megatron):
        return replace(split, world=2 * split.world)
    return replace(split, degree=2 * split.degree) if split.degree == gpus else split
