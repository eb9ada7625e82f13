"""The roles of a run in one table, how many devices it has, and how each role shares them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from paddock.config import rollout_correction, tree
from paddock.config.distillation import teachers_of
from paddock.config.engine import SPLITS_MODELS
from paddock.config.recipes import needs_of
from paddock.config.roles import RATIO_LOSSES, ActorConfig, ActorRolloutRefConfig, CriticConfig, RefConfig
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config, RewardModelConfig
from paddock.facts.models import shape_of

ONE_THREAD_BELOW = 20_000_000  # parameters


@dataclass(frozen=True)
class DevicePool:
    """Devices, a process each, and the roles that live together in every one of those processes."""

    name: str
    nodes: int
    per_node: int
    roles: tuple[str, ...]
    key: str
    """Section of the config that says how many there are."""
    beside: str | None = None
    """Name of the pool whose devices its processes share; None: it has devices of its own."""
    ranks_per_device: int = 1

    @property
    def size(self) -> int:
        """Returns the number of processes."""
        return self.nodes * self.per_node

    @property
    def place(self) -> str:
        """Returns the name of the pool whose devices these are: processes of equal rank and place share one."""
        return self.beside or self.name


@dataclass(frozen=True)
class RoleKind:
    """Describes a role of a run. The phases in which it works are in phases.py."""

    name: str
    """Name of the role in pools, in processes and in the memory model."""
    wanted: Callable[[Config], bool]
    """True if the run has it."""
    section: str
    """Section of its keys: those of its training engine, if it has one."""
    fsdp: str = ""
    """Section of its FSDP keys."""
    whole: bool = False
    """True if its model lies whole on each device, without a training engine's backend."""
    apart: Callable[[Config], bool] = lambda config: False
    """True if it has a pool of its own, with nodes and devices by keys of its section."""
    frozen: bool = False
    """True for a policy beside the actor that is not trained."""
    several: Callable[[Config], list[str]] | None = None
    """Names of its models, if there may be several."""

    def models(self, config: Config) -> list[str]:
        """Returns the names of its models, under which a process has them."""
        return self.several(config) if self.several else [self.name]

    def keys(self, config: Config) -> Any:
        return tree.get(config, self.section)


_A, _REF, _RO = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))
_REWARD = "reward_model"
ROLES = {
    role.name: role
    for role in (
        RoleKind("actor", lambda config: True, _A, f"{_A}.fsdp_config"),
        RoleKind("rollout", lambda config: True, _RO, apart=lambda config: rolls_out_apart(config)),
        RoleKind("reference", lambda config: needs_reference(config), _REF, f"{_REF}.fsdp_config", frozen=True),
        RoleKind(
            "teachers", lambda config: config.distillation.enabled, _REF, f"{_REF}.fsdp_config", frozen=True,
            several=lambda config: [one.role for one in teachers_of(config.distillation)],
        ),
        RoleKind(
            "critic", lambda config: bool(config.critic.enable), "critic", "critic.model.fsdp_config",
            apart=lambda config: config.critic.enable_resource_pool,
        ),
        RoleKind(
            _REWARD, lambda config: scores_by_model(config), _REWARD, f"{_REWARD}.model.fsdp_config", whole=True,
            apart=lambda config: config.reward_model.enable_resource_pool,
        ),
    )
}  # fmt: skip
"""Roles by name, in the order in which a process makes them."""


def roles_of(config: Config) -> list[RoleKind]:
    """Returns the roles that the run has."""
    return [role for role in ROLES.values() if role.wanted(config)]


def engine_roles(config: Config) -> list[RoleKind]:
    """Returns the roles with a training engine, one for each section of keys."""
    return list({role.section: role for role in roles_of(config) if role.fsdp and not role.whole}.values())


def pools(config: Config) -> list[DevicePool]:
    """Roles share the trainer's devices, but for those that have a pool of their own."""
    trainer, together = config.trainer, [role.name for role in roles_of(config) if not role.apart(config)]
    main = DevicePool("main", trainer.nnodes, trainer.n_gpus_per_node or 1, tuple(together), "trainer")
    several = [main]
    for role in roles_of(config):
        if role.name == "rollout" and rolls_out_beside(config):
            several.append(replace(main, name=role.name, roles=(role.name,), beside=main.name))
        elif role.apart(config):
            keys = role.keys(config)
            several.append(DevicePool(role.name, keys.nnodes, keys.n_gpus_per_node, (role.name,), role.section))
    return [replace(pool, ranks_per_device=trainer.ranks_per_device) for pool in several]


ANSWERS, PAIRS = "answers", "pairs"
"""Roles of supervised runs: a policy that learns given answers, a reward model that learns from preference pairs."""


def supervised_pools(config: Config, role: str) -> list[DevicePool]:
    """Returns the one pool of a run that trains one model on given answers: the trainer's devices."""
    return [replace(pools(config)[0], roles=(role,))]


def rolls_out_apart(config: Config) -> bool:
    """Engines in processes of their own, to which the actor's weights travel."""
    return not config.actor_rollout_ref.hybrid_engine


def rolls_out_beside(config: Config) -> bool:
    """Engines in processes of their own on the trainer's devices: their pool has no nodes."""
    return rolls_out_apart(config) and config.actor_rollout_ref.rollout.nnodes == 0


def rollout_pool(config: Config) -> DevicePool:
    return next(pool for pool in pools(config) if "rollout" in pool.roles)


def device_count(wanted: Iterable[DevicePool]) -> int:
    """Returns the number of devices of these pools: a device that pools or ranks share counts once."""
    return math.ceil(sum(Fraction(pool.size, pool.ranks_per_device) for pool in wanted if not pool.beside))


def scores_by_model(config: Config) -> bool:
    """True if a reward model runs on devices of this run. A judge behind an endpoint does not."""
    return config.reward_model.enable and config.reward_model.judge.source != "endpoint"


def in_one_process(config: Config) -> bool:
    return [pool.size for pool in pools(config)] == [1]


def pool_size(config: Config, role: ActorConfig | RefConfig | CriticConfig) -> int:
    if isinstance(role, CriticConfig) and role.enable_resource_pool:
        return role.n_gpus_per_node * role.nnodes
    return world_size(config)


def world_size(config: Config) -> int:
    return (config.trainer.n_gpus_per_node or 1) * config.trainer.nnodes


THREADS = "OMP_NUM_THREADS"
"""Environment variable by which the user sets the number of threads; torch reads it when it is imported."""


def wants_one_thread(config: Config) -> bool:
    """True if torch's threads cost more than they do: for a small model on a CPU, and beside a GPU, where the host only
    packs rows. Such a run is many times slower with them."""
    shape = shape_of(config.actor_rollout_ref.model.path or "")
    return config.trainer.device != "cpu" or (shape is not None and shape.parameters < ONE_THREAD_BELOW)


def splits_models(role: ActorConfig | RefConfig | CriticConfig | RewardModelConfig) -> bool:
    """True if the role's engine splits matrices and layers over ranks, by the keys of `megatron` and `lora`."""
    return role.strategy in SPLITS_MODELS


def model_parallel_size(role: ActorConfig | RefConfig | CriticConfig) -> int:
    """Devices that work on the same rows."""
    if splits_models(role):
        m = role.megatron
        return m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
    return role.ulysses_sequence_parallel_size


def pipeline_stages(role: ActorConfig | RefConfig | CriticConfig) -> int:
    """Megatron's ranks stand stage after stage; those of one stage stand by their rows."""
    return role.megatron.pipeline_model_parallel_size if splits_models(role) else 1


def data_parallel_size(config: Config, role: ActorConfig | RefConfig | CriticConfig) -> int:
    """Devices, or groups of them, that work on different rows."""
    return max(1, pool_size(config, role) // model_parallel_size(role))


def engine_size(config: Config) -> int:
    """Devices that one rollout engine spans."""
    rollout = config.actor_rollout_ref.rollout
    if not engine_kind(rollout.name).copies_weights:
        return 1
    return (rollout.tensor_model_parallel_size or 1) * rollout.pipeline_model_parallel_size


def trains_adapters(group: ActorRolloutRefConfig) -> bool:
    """True if the actor trains LoRA adapters, by the keys of its engine."""
    model = group.model
    if splits_models(group.actor):
        return bool(model.lora.rank or model.lora.adapter_path)
    return bool(model.lora_rank or model.lora_adapter_path)


def merges_adapters(group: ActorRolloutRefConfig) -> bool:
    """True if rollouts run the actor's own weights with its adapters added to them. An engine that copies weights takes
    merged ones in any case, and Megatron's are always handed over so."""
    own = not engine_kind(group.rollout.name).copies_weights and group.hybrid_engine and not splits_models(group.actor)
    return own and group.model.lora.merge and trains_adapters(group)


def computes_merged(config: Config) -> bool:
    """True if the actor itself computes by merged weights, in training and in rollouts: where one process has them
    whole."""
    group = config.actor_rollout_ref
    alone = world_size(config) == 1 and not splits_models(group.actor)
    return alone and group.model.lora.merge and trains_adapters(group)


def needs_reference(config: Config) -> bool:
    """Only a KL term with a weight reads the reference, and only a run that learns from rewards has KL terms."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if not learns_from_rewards(config):
        return False
    in_reward = algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef > 0
    return in_reward or (actor.use_kl_loss and actor.kl_loss_coef > 0)


def runs_frozen_policies(config: Config) -> bool:
    """True if a reference or a teacher runs, by the keys of actor_rollout_ref.ref."""
    return any(role.frozen for role in roles_of(config))


def learns_from_rewards(config: Config) -> bool:
    """False if teachers alone train the actor: nothing then reads advantages, values or the reference."""
    return not config.distillation.enabled or config.distillation.distillation_loss.use_task_rewards


def estimator_needs(config: Config) -> frozenset[str]:
    """Returns what the run's estimator needs beside rewards; nothing if no loss reads its advantages."""
    return needs_of(config.algorithm.adv_estimator) if learns_from_rewards(config) else frozenset()


def takes_one_step(config: Config) -> bool:
    """True if a batch is one optimizer step of the actor."""
    actor = config.actor_rollout_ref.actor
    return actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1


def needs_old_pass(config: Config) -> bool:
    """True if a pass before the update gives what nothing else does: sums of squares for the estimator, or experts to
    replay."""
    return "sum_pi_squared" in estimator_needs(config) or config.actor_rollout_ref.actor.router_replay.mode == "R2"


def corrects_rollout(config: Config) -> bool:
    return rollout_correction.parse(config.algorithm.rollout_correction).active


def trusts_rollout(config: Config) -> bool:
    """True if the rollout's log-probs are the trainer's: one optimizer step, and the actor's own modules sampled, or
    equal ones in a pool apart, with the same weights."""
    group = config.actor_rollout_ref
    merged = merges_adapters(group) or (rolls_out_apart(config) and trains_adapters(group))
    same_weights = config.algorithm.staleness == 0 and (computes_merged(config) or not merged)
    if rolls_out_apart(config):
        same_weights = same_weights and group.rollout.dtype == group.actor.fsdp_config.dtype
    same_numbers = same_weights and engine_kind(group.rollout.name).trainer_log_probs and not needs_old_pass(config)
    return takes_one_step(config) and same_numbers and not corrects_rollout(config)


def anchors_at_rollout(config: Config) -> bool:
    """True if rollouts run ahead and the loss compares the policy with the weights that drew a token: where a batch is
    one optimizer step, a clip of that ratio acts, and one of the ratio to the step's own weights never does."""
    ahead, loss = config.algorithm.staleness > 0, config.actor_rollout_ref.actor.policy_loss.loss_mode
    plain = loss in RATIO_LOSSES and not needs_old_pass(config) and not corrects_rollout(config)
    return ahead and plain and takes_one_step(config)


def copies_rollout_log_probs(config: Config) -> bool:
    """True if `old_log_probs` are those of the rollout: in bypass mode, as the anchor of tokens of older weights,
    or as the same numbers. False: a forward pass computes them."""
    bypass = rollout_correction.parse(config.algorithm.rollout_correction).bypass
    return bypass or anchors_at_rollout(config) or trusts_rollout(config)
