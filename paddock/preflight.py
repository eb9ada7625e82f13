"""Before training starts: is everything here that the config names? Checked without importing anything heavy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paddock.config import tree
from paddock.config.paths import BUILTIN, missing_folder
from paddock.config.schema import Config
from paddock.config.topology import in_one_process, pool_size, pools, trains_adapters, wants_one_thread
from paddock.errors import UserError
from paddock.facts.distribution import install_command
from paddock.facts.machine import Machine, this_machine
from paddock.plan.arithmetic import require_files
from paddock.trainer.lock import require_free

ENGINE_PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
LOGGER_PACKAGES = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")


NOT_BUILT = (
    "actor_rollout_ref.actor.router_replay.record_file", "actor_rollout_ref.actor.router_replay.replay_file",
    "actor_rollout_ref.actor.profiler.enable",
    "actor_rollout_ref.rollout.multi_turn.enable", "actor_rollout_ref.rollout.over_sample_rate",
    "actor_rollout_ref.rollout.quantization", "actor_rollout_ref.rollout.prometheus.enable",
    "critic.profiler.enable", "reward_model.ulysses_sequence_parallel_size",
    "global_profiler.tool", "trainer.esi_redundant_time",
)  # fmt: skip
"""Keys that `plan` understands and training does not honour yet: refused unless they have their default."""

_M, _RO = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
MODEL_FOLDERS = (f"{_M}.path", f"{_M}.tokenizer_path", f"{_M}.lora_adapter_path", "data.tokenizer",
                 "critic.model.path", "critic.model.tokenizer_path")  # fmt: skip
OUTPUT_FOLDERS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
_NO_COPY_CHOICE = (
    f"{_RO}.enable_rollout_routing_replay",
    f"{_RO}.data_parallel_size", f"{_RO}.checkpoint_engine.backend", f"{_RO}.checkpoint_engine.engine_kwargs",
)  # fmt: skip
NOT_OF_ENGINE = {"vllm": (*_NO_COPY_CHOICE, f"{_RO}.expert_parallel_size"), "sglang": _NO_COPY_CHOICE}


def check(config: Config, machine: Machine | None = None) -> None:
    machine = machine or this_machine()
    _built(config)
    choose_threads(config)
    _packages(config, machine)
    check_paths(config)
    _reward_model(config)
    _processes(config, machine)
    _devices(config, machine)
    require_free(config.trainer.default_local_dir)


def check_paths(
    config: Config, splits: Sequence[str] = ("train", "val"), outputs: Sequence[str] = OUTPUT_FOLDERS
) -> None:
    """Model folders, data files of these splits, and the folders that these keys name to write into."""
    for key in MODEL_FOLDERS:  # what the user named comes before what a default asks for
        if config.critic.enable or not key.startswith("critic."):
            _folder(key, tree.get(config, key))
    require_files(config, splits)
    for key in outputs:
        path = tree.get(config, key)
        if path is not None and not path.strip():
            raise UserError("is empty; is a shell variable unset?", key=key, value="''", fix=f"{key}=FOLDER")
        if path is not None:
            require_writable(key, Path(path))


def require_writable(key: str, folder: Path) -> None:
    """Refuses a folder to write into that is a file, or that could not be made: known now, not after hours of work."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not os.path.isdir(there):
        what = "is a file, not a folder" if there == folder else f"cannot be made: {there} is a file"
        raise UserError(what, key=key, value=folder, fix="name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{there} may not be written", key=key, value=folder, fix="make it writable, or name another")


def require_writable_file(key: str, file: Path) -> None:
    if os.path.isdir(file):
        raise UserError("is a folder, not a file", key=key, value=file, fix=f"name a file: {key}={file}/FILE")
    require_writable(key, file.absolute().parent)


def choose_threads(config: Config) -> None:
    """Sets the number of threads before torch reads it at its import; the user's own setting wins."""
    if wants_one_thread(config):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def _built(config: Config) -> None:
    default = Config()
    for key in NOT_BUILT:
        value = tree.get(config, key)
        if value != tree.get(default, key):
            raise UserError(
                "is not built yet: this version plans with it and does not train",
                key=key,
                value=value,
                fix="leave it out",
            )
    engine = config.actor_rollout_ref.rollout.name
    for key in NOT_OF_ENGINE.get(engine or "", ()):
        if tree.get(config, key) != tree.get(default, key):
            raise UserError(f"is not built yet for {engine}", key=key, value=tree.get(config, key), fix="leave it out")


def _packages(config: Config, machine: Machine) -> None:
    rollout = config.actor_rollout_ref.rollout.name or ""
    package = ENGINE_PACKAGES.get(rollout)
    if package and not machine.has(package):
        raise UserError(
            f"needs {package}",
            key="actor_rollout_ref.rollout.name",
            value=rollout,
            fix=f"{install_command(package)}, or use actor_rollout_ref.rollout.name=embedded",
        )
    by_peft = config.actor_rollout_ref.actor.strategy != "megatron" and trains_adapters(config)
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
        if logger in LOGGER_PACKAGES and not machine.has(logger):
            raise UserError(
                f"needs {logger}",
                key="trainer.logger",
                value=logger,
                fix=f"{install_command(logger)}, or leave it out of trainer.logger",
            )


def _processes(config: Config, machine: Machine) -> None:
    """What only several processes can do, and what they need."""
    actor = config.actor_rollout_ref.actor
    trained = (
        ("actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config", actor),
        ("critic", "critic.model.fsdp_config", config.critic),
    )
    for section, keys, role in trained:
        size = pool_size(config, role)
        if size == 1 and tree.get(config, f"{keys}.offload_policy"):
            raise UserError(
                "is FSDP2's, and one device runs `single`",
                key=f"{keys}.offload_policy",
                value=True,
                fix=f"{keys}.param_offload=True {keys}.optimizer_offload=True",
            )
        if size > 1 and role.strategy == "single":
            key = f"{section}.strategy"
            raise UserError(f"trains on one device, and there are {size}", key=key, value="single", fix=f"{key}=fsdp")
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


def _devices(config: Config, machine: Machine) -> None:
    """Of this machine, where the run stays on it. What a cluster has is known once it is joined."""
    trainer = config.trainer
    joins = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    several = not in_one_process(config)
    asked = pools(config)
    if trainer.device == "cpu" or any(pool.nodes > 1 for pool in asked) or (several and joins):
        return
    wanted = sum(pool.size for pool in asked)
    left = machine.devices - sum(pool.size for pool in asked[1:])
    if machine.device != trainer.device or machine.devices < wanted:
        there = f"{machine.devices} {machine.device} device(s)" if machine.devices else "no accelerator"
        raise UserError(
            f"this machine has {there}, and the run asks for {wanted} of trainer.device={trainer.device}",
            key="trainer.n_gpus_per_node",
            value=trainer.n_gpus_per_node,
            fix=f"trainer.n_gpus_per_node={left}" if left > 0 else "trainer.device=cpu",
        )


def _folder(key: str, path: str | None) -> None:
    """A model's, where its name is not one of the hub's."""
    path = path or ""
    local = path.startswith(("/", ".", "~")) or path.count("/") > 1 or os.path.isfile(path)
    if local and not path.startswith(BUILTIN) and not os.path.isdir(path):
        raise missing_folder(key, path, "check the path, or give a hub name")


def _reward_model(config: Config) -> None:
    reward = config.reward_model
    if not reward.enable:
        return
    _folder("reward_model.model.path", reward.model.path)
    if reward.judge.source == "endpoint":
        return
    if reward.enable_resource_pool and reward.nnodes == 0:
        raise UserError("its pool has no node", key="reward_model.nnodes", value=0, fix="reward_model.nnodes=1")
    if reward.strategy == "megatron":
        key = "reward_model.strategy"
        raise UserError("is not built yet", key=key, value="megatron", fix=f"{key}=fsdp, on one device")
