"""What a key left unset becomes, by the chosen algorithm. The one place for it; `paddock plan` prints what it gave.

An estimator's entry is the one place that declares its needs, so that a run that cannot meet them is refused before
anything heavy is imported; `paddock.algorithms.advantages` registers one function for each entry. A plug-in declares an
estimator of its own by `@estimator(name, needs=...)`, which adds an entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paddock.config.paths import files_of
from paddock.facts.models import BUILTIN

_N = "actor_rollout_ref.rollout.n"


@dataclass(frozen=True)
class Recipe:
    about: str
    needs: frozenset[str] = frozenset()  # of NEEDS
    values: dict[str, Any] = field(default_factory=dict)


def _grouped(about: str, *needs: str) -> Recipe:
    return Recipe(about, frozenset({"groups", *needs}), {_N: 5})


ESTIMATORS: dict[str, Recipe] = {
    "gae": Recipe("PPO: a critic and generalised advantage estimation", frozenset({"critic"}), {_N: 1}),
    "grpo": _grouped("GRPO: rewards relative to the group's mean and std"),
    "rloo": Recipe(
        "RLOO: the other responses' mean reward is the baseline",
        frozenset({"groups"}),
        {
            _N: 5,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": 0.001,
            "actor_rollout_ref.actor.use_kl_loss": False,
            "actor_rollout_ref.actor.optim.lr": 1e-6,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
            "actor_rollout_ref.ref.fsdp_config.param_offload": True,
        },
    ),
    "grpo_passk": _grouped("only the best response of a group is rewarded, by its lead over the second"),
    "reinforce_plus_plus": Recipe("REINFORCE++: discounted returns, whitened over the batch", values={_N: 1}),
    "reinforce_plus_plus_baseline": _grouped("REINFORCE++ with the group's mean as baseline"),
    "remax": Recipe("ReMax: a greedy response is the baseline", frozenset({"greedy_baseline"}), {_N: 1}),
    "opo": _grouped("OPO: the length-weighted mean reward is the baseline"),
    "gpg": _grouped("GPG: rewards relative to the group's mean, scaled by the share of non-zero rewards"),
    "optimal_token_baseline": _grouped("a variance-minimising baseline for every token", "sum_pi_squared", "one_turn"),
    "tir_optimal_token_baseline": _grouped("the same over turns with tools", "sum_pi_squared"),
    "gdpo": _grouped("GDPO: every reward component normalised on its own", "reward_components"),
}

OWN = frozenset(ESTIMATORS)
ALIASES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}

# --config-name: the settings in which the two launch files that people know differ from the schema.
CONFIG_NAMES: dict[str, dict[str, Any]] = {
    "ppo_trainer": {},
    "ppo_megatron_trainer": {"actor_rollout_ref.actor.strategy": "megatron"},
}

DEVICE, DEVICES = "trainer.device", "trainer.n_gpus_per_node"
_MODEL, _FILES = "actor_rollout_ref.model.path", "data.train_files"
EMBEDDED_UNLESS_SET = (_MODEL, _FILES, DEVICES)  # processes on a CPU are no GPUs
EMBEDDED: dict[str, Any] = {
    "actor_rollout_ref.model.path": "builtin:tiny",
    "data.train_files": "builtin:addition/train",
    "data.val_files": "builtin:addition/test",
    "data.train_batch_size": 64,
    "data.max_prompt_length": 16,
    "data.max_response_length": 8,
    _N: 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
    "actor_rollout_ref.actor.optim.lr": 5e-4,
    "critic.optim.lr": 1e-3,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "critic.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.ref.fsdp_config.dtype": "float32",
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    "critic.model.fsdp_config.dtype": "float32",
    "actor_rollout_ref.actor.megatron.dtype": "float32",
    "actor_rollout_ref.ref.megatron.dtype": "float32",
    "critic.megatron.dtype": "float32",
    "reward_model.model.fsdp_config.dtype": "float32",
    "trainer.total_training_steps": 80,
    "trainer.test_freq": 20,
}

EPISODES: dict[str, Any] = {
    "data.train_files": "builtin:episodes/train",
    "data.val_files": "builtin:episodes/test",
}
"""Data of a run that names an environment and no data: rows without a question, for the environment asks."""
EMBEDDED_IN: dict[str, dict[str, Any]] = {
    "builtin:calculator": {
        "actor_rollout_ref.model.path": "builtin:tiny-tools",
        "data.train_files": "builtin:products/train",
        "data.val_files": "builtin:products/test",
        "data.train_batch_size": 32,
        "data.max_response_length": 40,
    },
    "builtin:guess": {**EPISODES, "data.train_batch_size": 32, "data.max_response_length": 40},
}
"""The embedded default in environments that come with the package, where it differs."""


def embedded(environment: Any) -> dict[str, Any]:
    """Returns the embedded default of a run in this environment."""
    return EMBEDDED | EMBEDDED_IN.get(str(environment), EPISODES if environment else {})


def is_embedded(chosen: Mapping[str, Any], chooses: bool) -> bool:
    """True for the embedded default, which works on any machine, offline: a run whose model and data are built in,
    named or not, on whatever devices. A launch script written for verl (not `chooses`) is one if it names neither
    these nor hardware."""
    if not chooses:
        deciding = {*EMBEDDED_UNLESS_SET} - ({DEVICES} if chosen.get(DEVICE) == "cpu" else set())
        return not any(chosen.get(key) is not None for key in deciding)
    named = [path for key in (_MODEL, _FILES) for path in files_of(chosen.get(key))]
    return all(str(path).startswith(BUILTIN) for path in named)


STEPS, EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"


def left_to_user(values: dict[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns defaults without the number of steps, if the user says how many passes over the rows there are; without
    that of passes, if the user says how many steps."""
    other = {STEPS: EPOCHS, EPOCHS: STEPS}
    return {key: value for key, value in values.items() if key not in other or chosen.get(other[key]) is None}


# Otherwise a missing model or data file is the guide's.
GUIDE: dict[str, Any] = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2-7B-Instruct",
    "data.train_files": "~/data/gsm8k/train.parquet",
    "data.val_files": "~/data/gsm8k/test.parquet",
}
GUIDE_GPUS_PER_NODE, GUIDE_NPUS_PER_NODE = 8, 16
ON_NPU: dict[str, Any] = {
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
    "actor_rollout_ref.rollout.enable_chunked_prefill": False,
}
GUIDE_TENSOR_PARALLEL = 2


NEEDS = frozenset({"groups", "critic", "greedy_baseline", "sum_pi_squared", "reward_components", "one_turn"})


def recipe_of(estimator: str) -> Recipe | None:
    return ESTIMATORS.get(ALIASES.get(estimator, estimator))


def needs_of(estimator: str) -> frozenset[str]:
    """Returns what the estimator needs of a run beside rewards."""
    recipe = recipe_of(estimator)
    return recipe.needs if recipe else frozenset()


def known_needs(needs: Iterable[str]) -> frozenset[str]:
    if unknown := set(needs) - NEEDS:
        raise ValueError(f"unknown needs {sorted(unknown)}: {sorted(NEEDS)} are known")
    return frozenset(needs)


def declare(estimator: str, about: str, needs: frozenset[str]) -> Recipe:
    """Adds a plug-in's estimator to the catalogue; unset keys keep the schema's defaults. Our own stay as they are."""
    if estimator not in OWN:
        ESTIMATORS[estimator] = Recipe(about, needs)
    return ESTIMATORS[estimator]
