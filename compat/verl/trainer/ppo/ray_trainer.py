"""The trainer's own steps under verl's names, and its class: Paddock's trainer behind verl's constructor."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from paddock.algorithms.advantages import compute_advantages
from paddock.algorithms.kl import KLController, penalise
from paddock.commands.preflight import check
from paddock.config.schema import AlgorithmConfig, Config
from paddock.errors import UserError
from paddock.loading.load import load
from verl.protocol import response_mask_of, to_batch
from verl.trainer.ppo._advantages import AdvantageEstimator, plain_name
from verl.trainer.ppo._view import View
from verl.trainer.ppo.utils import Role

log = logging.getLogger(__name__)

FROM_CONFIG = {
    "tokenizer": "set actor_rollout_ref.model.tokenizer_path",
    "role_worker_mapping": "roles follow from the config",
    "resource_pool_manager": "set trainer.nnodes and trainer.n_gpus_per_node",
    "ray_worker_group_cls": "workers follow from the config",
    "processor": "it comes with actor_rollout_ref.model.path",
    "reward_fn": "set custom_reward_function.path and .name",
    "val_reward_fn": "set custom_reward_function.path and .name, which score validation too",
    "train_dataset": "set data.train_files",
    "val_dataset": "set data.val_files",
    "collate_fn": "rows are batched by the loader",
    "train_sampler": "set data.shuffle and data.seed",
    "device_name": "set trainer.device",
}
"""Arguments of verl's constructor, and what has their place."""


class Controller(KLController):
    """Any that has `value` and `update(current_kl, n_steps)`."""

    def __init__(self, theirs: Any):
        super().__init__(theirs.value)
        self.theirs = theirs

    def update(self, current_kl: float, rows: int) -> None:
        self.theirs.update(current_kl=current_kl, n_steps=rows)


def apply_kl_penalty(data: Any, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[Any, dict[str, float]]:
    """Adds `token_level_rewards`; then the controller sees the KL."""
    batch, metrics = penalise(to_batch(data), kl_penalty, Controller(kl_ctrl))
    data.batch["token_level_rewards"] = batch.need("rewards")
    return data, metrics


def compute_response_mask(data: Any) -> Tensor:
    return response_mask_of(data)


def compute_advantage(
    data: Any,
    adv_estimator: str | AdvantageEstimator,
    gamma: float | None = None,
    lam: float | None = None,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
) -> Any:
    """Adds `advantages` and `returns`, zero outside the mask, and `response_mask` if it is not there.

    What is not given is read from the config, and where that says nothing it is Paddock's default. Groups come from
    `uid`, so `num_repeat` asks for nothing. Needs are checked as in a run: GRPO refuses a group of one.
    """
    given = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    chosen = {name: value for name, value in given.items() if value is not None}
    algorithm = View(config, AlgorithmConfig(), adv_estimator=plain_name(adv_estimator), **chosen)
    if algorithm.use_pf_ppo:
        raise UserError(
            "resampling needs the seed and the step of a run",
            key="algorithm.use_pf_ppo",
            value=True,
            fix="leave it to Paddock's trainer, or call paddock.algorithms.selection.resample afterwards",
        )
    batch = compute_advantages(to_batch(data), algorithm)
    data.batch["response_mask"] = batch.need("mask")
    data.batch["advantages"], data.batch["returns"] = batch.need("advantages"), batch.need("returns")
    return data


class RayPPOTrainer:
    """Paddock's trainer on a config of verl's keys. What the other arguments would bring follows from the config.

    >>> RayPPOTrainer(config).fit()
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        given = dict(zip(FROM_CONFIG, args, strict=False)) | kwargs
        if unknown := sorted(given.keys() - FROM_CONFIG.keys()):
            raise TypeError(f"RayPPOTrainer takes no arguments {unknown}")
        asked = {name: FROM_CONFIG[name] for name, value in given.items() if value is not None}
        if asked:
            raise UserError(
                f"RayPPOTrainer cannot use the arguments {', '.join(asked)}: Paddock builds these from the config",
                fix="RayPPOTrainer(config).fit(); " + "; ".join(f"for {name}: {fix}" for name, fix in asked.items()),
            )
        self.config = paddock_config(config)

    def init_workers(self) -> None:
        """Nothing to do: `fit` builds what it needs."""

    def fit(self) -> bool:
        """True when all steps are done; False when it was interrupted and a checkpoint waits."""
        from paddock.trainer.reinforcement import train

        check(self.config)
        return train(self.config).finished


def paddock_config(config: Any) -> Config:
    """Any mapping of verl's keys, read as a config file is: unknown keys are refused, retired ones reported."""
    if isinstance(config, Config):
        return config
    with TemporaryDirectory() as folder:
        OmegaConf.save(OmegaConf.create(config), Path(folder) / "given.yaml", resolve=True)
        loaded = load(["--config-path", folder, "--config-name", "given"])
    for warning in loaded.warnings:
        log.warning(warning)
    return loaded.config


REFUSED = {"ResourcePoolManager": "set trainer.nnodes and trainer.n_gpus_per_node"}


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        raise UserError(f"verl's {name} is not here: Paddock places workers by the config", fix=REFUSED[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AdvantageEstimator",
    "RayPPOTrainer",
    "Role",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
]
