"""Rules on what this machine must have: packages, processes and devices."""

from __future__ import annotations

import os
from collections.abc import Iterator

from paddock.config.loggers import LOGGERS
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.config.topology import device_count, in_one_process, pools, rolls_out_apart, splits_models, trains_adapters
from paddock.facts.distribution import install_command
from paddock.facts.machine import Machine
from paddock.loading.rules.form import Breach, Scope, rule

STRATEGY, ENGINE = "actor_rollout_ref.actor.strategy", "actor_rollout_ref.rollout.name"
LORA = "actor_rollout_ref.model.lora_rank"
DEVICES = "trainer.n_gpus_per_node"


@rule(Scope.MACHINE)
def packages_are_installed(config: Config, machine: Machine) -> Iterator[Breach]:
    group, npu = config.actor_rollout_ref, config.trainer.device == "npu"
    rollout = group.rollout.name
    megatron, package = splits_models(group.actor), engine_kind(rollout).package
    if package and not machine.has(package):
        yield ENGINE, f"needs {package}", f"{install_command(package)}, or use {ENGINE}=embedded"
    by_peft = (trains_adapters(group) and not megatron) or config.critic.model.lora_rank
    if by_peft and not machine.has("peft"):
        yield LORA, "LoRA needs peft", f"{install_command('lora')}, or leave it out"
    if megatron and npu:
        yield STRATEGY, "megatron-core asks for CUDA", f"{STRATEGY}=fsdp"
    if megatron and not machine.has("megatron"):
        yield STRATEGY, "needs megatron-core", f"{install_command('megatron')}, or {STRATEGY}=fsdp"
    if npu and not machine.has("torch_npu"):
        fix = "pip install torch_npu of torch's own version, beside CANN; or trainer.device=cuda or cpu"
        yield "trainer.device", "Ascend devices need torch_npu, which is not installed", fix
    if npu and rollout == "vllm" and not machine.has("vllm_ascend"):
        fix = f"pip install vllm-ascend of vLLM's own version, or {ENGINE}=embedded"
        yield ENGINE, "vLLM runs on Ascend devices by vllm-ascend, which is not installed", fix
    for logger in config.trainer.logger:
        package = LOGGERS[logger].package
        if package and not machine.has(package):
            fix = f"{install_command(package)}, or leave it out of trainer.logger"
            yield "trainer.logger", f"needs {package}", fix, logger


@rule(Scope.MACHINE)
def processes_can_be_started(config: Config, machine: Machine) -> Iterator[Breach]:
    """Checks what only several processes can do, and what they need."""
    if in_one_process(config):
        return
    if splits_models(config.actor_rollout_ref.actor) and config.trainer.device == "cpu":
        yield STRATEGY, "runs on a CPU in one process only", f"{STRATEGY}=fsdp, or GPUs"
    if not machine.has("ray"):
        several = pools(config)
        own = "".join(f", without a pool of its own for the {pool.name}" for pool in several[1:])
        fix = f"{install_command('ray')}, or {DEVICES}=1 trainer.nnodes=1{own}"
        yield DEVICES, f"{sum(pool.size for pool in several)} processes need ray", fix


@rule(Scope.MACHINE)
def devices_are_here(config: Config, machine: Machine) -> Iterator[Breach]:
    """Checks the devices of this machine, if the run stays on it. A cluster's are known once it is joined."""
    trainer = config.trainer
    joins = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    asked = pools(config)
    if trainer.device == "cpu" or any(pool.nodes > 1 for pool in asked) or (joins and not in_one_process(config)):
        return
    wanted, left = device_count(asked), machine.devices - device_count(asked[1:])
    if machine.device == trainer.device and machine.devices >= wanted:
        return
    there = f"{machine.devices} {machine.device} device(s)" if machine.devices else "no accelerator"
    fix = "trainer.device=cpu"
    if left > 0:
        fix = f"{DEVICES}={left * trainer.ranks_per_device}"
    elif rolls_out_apart(config) and machine.device == trainer.device:
        fix = "actor_rollout_ref.rollout.nnodes=0, so that the rollout shares the trainer's devices"
    yield DEVICES, f"this machine has {there}, and the run asks for {wanted} of trainer.device={trainer.device}", fix
