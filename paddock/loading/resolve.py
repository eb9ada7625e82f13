"""What keys left unset become, by the machine and by other keys. Each function settles one question and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paddock.config import recipes, tree
from paddock.config.paths import files_of
from paddock.config.phases import SWITCHED, TOKEN_BUDGETS
from paddock.config.rewards import reward_parts
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config, row_tokens
from paddock.config.topology import (
    anchors_at_rollout,
    corrects_rollout,
    estimator_needs,
    rollout_pool,
    rolls_out_apart,
)
from paddock.facts.datasets import known_dataset
from paddock.facts.files import held_out_split
from paddock.facts.machine import Machine
from paddock.facts.models import shape_of

CPU_BUDGET = 1280
DEFAULT_EPOCHS = 15


def resolve(config: Config, origins: dict[str, str], machine: Machine, anywhere: bool = False) -> list[str]:
    """Fill every key that is still unset and has an answer; returns warnings. `anywhere`: the run's model and data work
    on any machine."""
    fill = _Filler(config, origins)
    _hardware(config, fill, machine, anywhere)
    _ascend(config, origins)
    _cpu_budgets(config, origins)
    _rollout_engine(config, fill, machine)
    _batches(config, fill, origins)
    fill(
        "critic.enable",
        "critic" in estimator_needs(config),
        f"algorithm.adv_estimator={config.algorithm.adv_estimator}",
    )
    _reward_components(config, origins)
    _correction(config, origins)
    _seeds_and_loggers(config, fill, machine)
    return _validation_files(config, fill) + _unused_row_counts(config)


class _Filler:
    def __init__(self, config: Config, origins: dict[str, str]):
        self.config, self.origins = config, origins

    def __call__(self, key: str, value: Any, why: str) -> None:
        if tree.get(self.config, key) is None:
            tree.put(self.config, key, value)
            self.origins[key] = why


def _hardware(config: Config, fill: _Filler, machine: Machine, anywhere: bool) -> None:
    """All accelerators that are there; without one, the CPU if the model fits it, else the guide's eight GPUs. Devices
    that are counted are GPUs, unless the run works `anywhere`: then they are processes of the CPU."""
    trainer = config.trainer
    asked_for_gpus = not anywhere and (trainer.n_gpus_per_node is not None or trainer.nnodes > 1)
    shape = shape_of(config.actor_rollout_ref.model.path or "")
    too_large = shape is not None and not machine.holds_training(shape.parameters, "cpu")
    if trainer.device == "cpu":
        fill("trainer.n_gpus_per_node", 1, "one CPU process")
    elif machine.devices and trainer.device in (None, machine.device):
        fill("trainer.device", machine.device, f"machine: {machine.devices} {machine.device} device(s)")
        fill("trainer.n_gpus_per_node", machine.devices * trainer.ranks_per_device, "machine")
    elif trainer.device is not None or asked_for_gpus or too_large:
        why = "GPUs are asked for" if asked_for_gpus else "the model is too large for this CPU"
        fill("trainer.device", "cuda", why)
        each = recipes.GUIDE_NPUS_PER_NODE if trainer.device == "npu" else recipes.GUIDE_GPUS_PER_NODE
        fill("trainer.n_gpus_per_node", each, "guide: this machine has none")
    else:
        fill("trainer.device", "cpu", "machine: no accelerator")
        fill("trainer.n_gpus_per_node", 1, "one CPU process")


def _ascend(config: Config, origins: dict[str, str]) -> None:
    """Sets what recipes for Ascend devices set, if the user said nothing."""
    for key, value in recipes.ON_NPU.items() if config.trainer.device == "npu" else ():
        if origins.get(key, "follows").startswith("follows"):
            tree.put(config, key, value)
            origins[key] = "trainer.device=npu"


def _cpu_budgets(config: Config, origins: dict[str, str]) -> None:
    """Lowers token budgets that nobody set: a CPU is as fast with small micro-batches, which stay in its caches, and
    takes a fraction of the memory. Two sequences always find room: reward models train on pairs."""
    room = max(CPU_BUDGET, 2 * row_tokens(config.data))
    why = "trainer.device=cpu"
    for key in TOKEN_BUDGETS if config.trainer.device == "cpu" else ():
        asked = origins.get(key, f"follows {key}")
        if asked.startswith("follows") and origins.get(asked.removeprefix("follows "), why) == why:
            tree.put(config, key, min(room, tree.get(config, key)))
            origins[key] = why


def _rollout_engine(config: Config, fill: _Filler, machine: Machine) -> None:
    rollout, trainer = "actor_rollout_ref.rollout", config.trainer
    devices = (trainer.n_gpus_per_node or 1) * trainer.nnodes
    each = rollout_pool(config).per_node
    if rolls_out_apart(config) and trainer.device != "cpu" and machine.has("vllm"):
        fill(f"{rollout}.name", "vllm", "an engine in a pool of its own")
    elif rolls_out_apart(config):
        fill(f"{rollout}.name", "embedded", "an engine in a pool of its own")
    elif trainer.device == "cpu" or devices == 1:
        fill(f"{rollout}.name", "embedded", "one device: the actor's own modules generate")
    elif machine.has("vllm"):
        fill(f"{rollout}.name", "vllm", "installed, and there are several devices")
    else:
        fill(f"{rollout}.name", "embedded", "vllm is not installed here")
    served = engine_kind(config.actor_rollout_ref.rollout.name).copies_weights
    if served and each % recipes.GUIDE_TENSOR_PARALLEL == 0:
        fill(f"{rollout}.tensor_model_parallel_size", recipes.GUIDE_TENSOR_PARALLEL, "guide")
    fill(f"{rollout}.tensor_model_parallel_size", 1, "the engine spans one device")
    on_cpu = trainer.device == "cpu"
    fill(f"{rollout}.max_num_seqs", 256 if on_cpu else 1024, f"trainer.device={trainer.device}")
    fill("reward_model.rollout.name", config.actor_rollout_ref.rollout.name, f"follows {rollout}.name")


def _batches(config: Config, fill: _Filler, origins: dict[str, str]) -> None:
    """A mini-batch is never larger than a batch unless the user wrote it so; without a row count, a token budget."""
    actor, data = config.actor_rollout_ref.actor, config.data
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
    by_default = origins.get(mini, "recipe").startswith(("recipe", "embedded"))
    if by_default and data.train_batch_size < actor.ppo_mini_batch_size:
        if config.critic.ppo_mini_batch_size == actor.ppo_mini_batch_size:
            config.critic.ppo_mini_batch_size = data.train_batch_size
        actor.ppo_mini_batch_size, origins[mini] = data.train_batch_size, "follows data.train_batch_size"
    for cut in SWITCHED:
        counted = tree.get(config, cut.rows_key) is not None
        fill(cut.switch_key, not counted, f"{cut.rows} is set" if counted else "a token budget: no row count is set")
    fill(
        "actor_rollout_ref.actor.loss_scale_factor", float(data.max_response_length), "follows data.max_response_length"
    )


def _reward_components(config: Config, origins: dict[str, str]) -> None:
    """An estimator that normalises each reward by itself takes the named rules and functions, with their weights."""
    algorithm = config.algorithm
    needs = estimator_needs(config)
    wanted = "reward_components" in needs and not algorithm.gdpo_reward_keys
    parts = reward_parts(config) if wanted else []
    if len(parts) < 2:  # a single function may return components in its dict, and only the user knows their names
        return
    algorithm.gdpo_reward_keys = [part.name for part in parts]
    origins["algorithm.gdpo_reward_keys"] = "rules and functions"
    if algorithm.gdpo_reward_weights is None:
        algorithm.gdpo_reward_weights = [part.weight for part in parts]
        origins["algorithm.gdpo_reward_weights"] = "reward_weights and custom_reward_function.weights"


def _correction(config: Config, origins: dict[str, str]) -> None:
    """Weighs tokens that older weights drew by how much likelier they have become, where no clip of that ratio acts."""
    algorithm, key = config.algorithm, "algorithm.rollout_correction.rollout_is"
    if algorithm.staleness and not corrects_rollout(config) and not anchors_at_rollout(config) and key not in origins:
        algorithm.rollout_correction.rollout_is, origins[key] = "token", f"algorithm.staleness={algorithm.staleness}"


def _seeds_and_loggers(config: Config, fill: _Filler, machine: Machine) -> None:
    if config.trainer.total_training_steps is None:
        fill("trainer.total_epochs", DEFAULT_EPOCHS, "guide")
    fill("data.seed", config.trainer.seed, "follows trainer.seed")
    fill("actor_rollout_ref.rollout.seed", config.trainer.seed, "follows trainer.seed")
    fill("reward_model.num_workers", machine.cores, "machine: cores")
    wandb = machine.has("wandb") and machine.wandb_ready
    why = "nobody is logged in to wandb" if machine.has("wandb") else "wandb is not installed"
    fill("trainer.logger", ["console", "wandb"] if wandb else ["console"], "guide" if wandb else why)
    if isinstance(config.trainer.logger, str):
        config.trainer.logger = [config.trainer.logger]


def _validation_files(config: Config, fill: _Filler) -> list[str]:
    """test.* beside every train.*, where it is there or is a data set that can be prepared."""
    if config.data.val_files is not None:
        return []
    siblings = [
        path.with_name(path.name.replace("train", "test", 1))
        for path in map(Path, files_of(config.data.train_files))
        if path.name.startswith("train")
    ]
    files = [str(path) for path in siblings if path.exists() or known_dataset(str(path))]
    files += [path for path in files_of(config.data.train_files) if held_out_split(path)]
    fill("data.val_files", files or None, "beside data.train_files")
    return [] if files else ["data.val_files is unset: there will be no validation"]


def _unused_row_counts(config: Config) -> list[str]:
    return [
        f"{cut.rows_key}={tree.get(config, cut.rows_key)} is not used: {cut.switch_key}=True packs by tokens"
        for cut in SWITCHED
        if tree.get(config, cut.switch_key) and tree.get(config, cut.rows_key) is not None
    ]
