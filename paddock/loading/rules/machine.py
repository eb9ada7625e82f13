"""Rules on what this machine must have: packages, processes and devices."""

from __future__ import annotations

import os

from paddock.config.loggers import LOGGERS
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.config.topology import device_count, in_one_process, pools, rolls_out_apart, trains_adapters
from paddock.errors import UserError
from paddock.facts.distribution import install_command
from paddock.facts.machine import Machine
from paddock.loading.rules.form import Scope, rule


@rule(Scope.MACHINE)
def packages_are_installed(config: Config, machine: Machine) -> None:
    rollout = config.actor_rollout_ref.rollout.name
    package = engine_kind(rollout).package
    if package and not machine.has(package):
        raise UserError(
            f"needs {package}",
            key="actor_rollout_ref.rollout.name",
            value=rollout,
            fix=f"{install_command(package)}, or use actor_rollout_ref.rollout.name=embedded",
        )
    by_peft = config.actor_rollout_ref.actor.strategy != "megatron" and trains_adapters(config.actor_rollout_ref)
    if (by_peft or config.critic.model.lora_rank) and not machine.has("peft"):
        raise UserError(
            "LoRA needs peft",
            key="actor_rollout_ref.model.lora_rank",
            value=config.actor_rollout_ref.model.lora_rank,
            fix=f"{install_command('lora')}, or leave it out",
        )
    if config.actor_rollout_ref.actor.strategy == "megatron" and config.trainer.device == "npu":
        key = "actor_rollout_ref.actor.strategy"
        raise UserError("megatron-core asks for CUDA", key=key, value="megatron", fix=f"{key}=fsdp")
    if config.actor_rollout_ref.actor.strategy == "megatron" and not machine.has("megatron"):
        raise UserError(
            "needs megatron-core",
            key="actor_rollout_ref.actor.strategy",
            value="megatron",
            fix=f"{install_command('megatron')}, or actor_rollout_ref.actor.strategy=fsdp",
        )
    if config.trainer.device == "npu" and not machine.has("torch_npu"):
        raise UserError(
            "Ascend devices need torch_npu, which is not installed",
            key="trainer.device",
            value="npu",
            fix="pip install torch_npu of torch's own version, beside CANN; or trainer.device=cuda or cpu",
        )
    if config.trainer.device == "npu" and rollout == "vllm" and not machine.has("vllm_ascend"):
        raise UserError(
            "vLLM runs on Ascend devices by vllm-ascend, which is not installed",
            key="actor_rollout_ref.rollout.name",
            value="vllm",
            fix="pip install vllm-ascend of vLLM's own version, or actor_rollout_ref.rollout.name=embedded",
        )
    for logger in config.trainer.logger:
        package = LOGGERS[logger].package
        if package and not machine.has(package):
            raise UserError(
                f"needs {package}",
                key="trainer.logger",
                value=logger,
                fix=f"{install_command(package)}, or leave it out of trainer.logger",
            )


@rule(Scope.MACHINE)
def processes_can_be_started(config: Config, machine: Machine) -> None:
    """Checks what only several processes can do, and what they need."""
    actor = config.actor_rollout_ref.actor
    if in_one_process(config):
        return
    if actor.strategy == "megatron" and config.trainer.device == "cpu":
        key = "actor_rollout_ref.actor.strategy"
        raise UserError("runs on a CPU in one process only", key=key, value="megatron", fix=f"{key}=fsdp, or GPUs")
    if not machine.has("ray"):
        several = pools(config)
        raise UserError(
            f"{sum(pool.size for pool in several)} processes need ray",
            key="trainer.n_gpus_per_node",
            value=config.trainer.n_gpus_per_node,
            fix=f"{install_command('ray')}, or trainer.n_gpus_per_node=1 trainer.nnodes=1"
            + "".join(f", without a pool of its own for the {pool.name}" for pool in several[1:]),
        )


@rule(Scope.MACHINE)
def devices_are_here(config: Config, machine: Machine) -> None:
    """Checks the devices of this machine, if the run stays on it. A cluster's are known once it is joined."""
    trainer = config.trainer
    joins = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    several = not in_one_process(config)
    asked = pools(config)
    if trainer.device == "cpu" or any(pool.nodes > 1 for pool in asked) or (several and joins):
        return
    wanted = device_count(asked)
    left = machine.devices - device_count(asked[1:])
    if machine.device != trainer.device or machine.devices < wanted:
        there = f"{machine.devices} {machine.device} device(s)" if machine.devices else "no accelerator"
        raise UserError(
            f"this machine has {there}, and the run asks for {wanted} of trainer.device={trainer.device}",
            key="trainer.n_gpus_per_node",
            value=trainer.n_gpus_per_node,
            fix=f"trainer.n_gpus_per_node={left * trainer.ranks_per_device}"
            if left > 0
            else fewer_devices(config, machine),
        )


def fewer_devices(config: Config, machine: Machine) -> str:
    """Returns the fix of a run whose pools ask for all devices of this machine, or more."""
    if rolls_out_apart(config) and machine.device == config.trainer.device:
        return "actor_rollout_ref.rollout.nnodes=0, so that the rollout shares the trainer's devices"
    return "trainer.device=cpu"
