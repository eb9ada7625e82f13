"""Before training starts: is everything here that the config names? Checked without importing anything heavy."""

from __future__ import annotations

from pathlib import Path

from paddock.config.paths import BUILTIN
from paddock.config.schema import Config
from paddock.errors import UserError
from paddock.facts.machine import Machine, this_machine
from paddock.plan.arithmetic import require_files

ENGINE_PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
LOGGER_PACKAGES = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
LOGGER_EXTRAS = {"tensorboard": "dashboard"}


def check(config: Config, machine: Machine | None = None) -> None:
    machine = machine or this_machine()
    _packages(config, machine)
    _devices(config, machine)
    require_files(config)
    _model(config)


def _packages(config: Config, machine: Machine) -> None:
    rollout = config.actor_rollout_ref.rollout.name or ""
    package = ENGINE_PACKAGES.get(rollout)
    if package and not machine.has(package):
        raise UserError(
            f"needs {package}",
            key="actor_rollout_ref.rollout.name",
            value=rollout,
            fix=f'pip install "paddock[{package}]", or use actor_rollout_ref.rollout.name=embedded',
        )
    for logger in config.trainer.logger:
        if logger in LOGGER_PACKAGES and not machine.has(logger):
            raise UserError(
                f"needs {logger}",
                key="trainer.logger",
                value=logger,
                fix=f'pip install "paddock[{LOGGER_EXTRAS.get(logger, logger)}]", or leave it out of trainer.logger',
            )


def _devices(config: Config, machine: Machine) -> None:
    trainer = config.trainer
    wanted = trainer.n_gpus_per_node or 1
    if trainer.device == "cpu" or trainer.nnodes > 1:
        return
    if machine.device != trainer.device or machine.devices < wanted:
        there = f"{machine.devices} {machine.device} device(s)" if machine.devices else "no accelerator"
        raise UserError(
            f"this machine has {there}, and trainer.device={trainer.device} asks for {wanted}",
            key="trainer.n_gpus_per_node",
            value=wanted,
            fix=f"trainer.n_gpus_per_node={machine.devices}" if machine.devices else "trainer.device=cpu",
        )


def _model(config: Config) -> None:
    path = config.actor_rollout_ref.model.path or ""
    local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if local and not path.startswith(BUILTIN) and not Path(path).is_dir():
        raise UserError(
            "no such folder", key="actor_rollout_ref.model.path", value=path, fix="check the path, or give a hub name"
        )
