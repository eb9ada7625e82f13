"""Before training starts: is everything here that the config names? Checked without importing anything heavy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from paddock.config import tree
from paddock.config.conversations import files_named
from paddock.config.distillation import teachers_of
from paddock.config.loggers import LOGGERS
from paddock.config.paths import BUILTIN, files_of, missing_file, missing_folder
from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.config.topology import (
    THREADS,
    device_count,
    in_one_process,
    pools,
    rolls_out_apart,
    trains_adapters,
    wants_one_thread,
)
from paddock.environments.calls import format_of
from paddock.errors import UserError
from paddock.facts.distribution import install_command
from paddock.facts.files import TRUTH, columns_of, is_here, prompt_column, sources, without_prompts
from paddock.facts.machine import Machine, this_machine
from paddock.loading.refusals import refused
from paddock.plan.arithmetic import require_files
from paddock.runs.lock import require_free

_M = "actor_rollout_ref.model"
MODEL_FOLDERS = (f"{_M}.path", f"{_M}.tokenizer_path", f"{_M}.lora_adapter_path", "data.tokenizer",
                 "critic.model.path")  # fmt: skip
RUNS = Config().trainer.default_local_dir.partition("/")[0]
OUTPUT_FOLDERS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")


def check(config: Config, machine: Machine | None = None) -> None:
    machine = machine or this_machine()
    for refusal in refusals(config):
        raise refusal
    _packages(config, machine)
    check_paths(config)
    if config.reward_model.enable:
        _folder("reward_model.model.path", config.reward_model.model.path)
    _processes(config, machine)
    _devices(config, machine)
    require_free(config.trainer.default_local_dir)


def refusals(config: Config) -> Iterator[UserError]:
    """Yields what training refuses on every machine."""
    yield from refused(config)
    yield from tools_refused(config)
    if config.actor_rollout_ref.model.external_lib:
        return  # it may add formats of tool calls
    try:
        format_of(config.actor_rollout_ref.rollout.multi_turn.format, template=None)
    except UserError as error:
        yield error


def tools_refused(config: Config) -> Iterator[UserError]:
    """Yields what no run takes of YAML files in verl's form. A planned script's files may be on another machine."""
    files = config.actor_rollout_ref.rollout.multi_turn
    named = [path for path in (files.tool_config_path, files.interaction_config_path) if path]
    if not any(os.path.isfile(path) for path in named):
        return
    from paddock.verl.tools import interaction_entries, tool_entries  # with asyncio, for the few who ask

    for path, read in ((files.tool_config_path, tool_entries), (files.interaction_config_path, interaction_entries)):
        if path and os.path.isfile(path):
            try:
                read(path)
            except UserError as error:
                yield error


def stops_here(config: Config) -> Iterator[UserError]:
    """Yields what this machine lacks for the run: packages, processes, devices. A plan may be for another machine."""
    for has_what_it_needs in (_packages, _processes, _devices):
        try:
            has_what_it_needs(config, this_machine())
        except UserError as error:
            yield error


def check_paths(
    config: Config, splits: Sequence[str] = ("train", "val"), outputs: Sequence[str] = OUTPUT_FOLDERS
) -> None:
    """Checks model folders, data files of these splits, and the folders that these keys name to write into."""
    for key in MODEL_FOLDERS:  # what the user named comes before what a default asks for
        if config.critic.enable or not key.startswith("critic."):
            _folder(key, tree.get(config, key))
    for teacher in teachers_of(config.distillation):
        _folder(teacher.setting, teacher.path)
    require_files(config, splits)
    for key, value, file in files_named(config):
        if not os.path.isfile(os.path.expanduser(file)):
            raise missing_file(key, value)
    for key in outputs:
        path = tree.get(config, key)
        if path is not None and not path.strip():
            raise UserError("is empty; is a shell variable unset?", key=key, value="''", fix=f"{key}=FOLDER")
        if path is not None:
            require_writable(key, Path(path))


def require_prompts(config: Config, splits: Sequence[str] = ("train", "val")) -> None:
    """Refuses files whose rows have no column of prompts. A user's data set reads its files by itself."""
    if config.data.custom_cls.path:
        return
    named = config.data.prompt_key
    for key in (f"data.{split}_files" for split in splits):
        for path in files_of(tree.get(config, key)):
            for source in sources(path, key) if is_here(path) and not path.startswith(BUILTIN) else ():
                columns = columns_of(source, key)
                if named not in columns and (TRUTH in columns or not prompt_column(columns, named)):
                    raise without_prompts(source.path, columns, named, key)


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


def require_other_file(key: str, file: Path, config: Config) -> None:
    """Refuses to write over the rows that the same command reads."""
    files = config.data.val_files
    read = [os.path.expanduser(name) for name in (files if isinstance(files, list) else [files] if files else [])]
    if any(os.path.exists(name) and file.exists() and os.path.samefile(name, file) for name in read):
        raise UserError("is a file of rows that this command reads", key=key, value=file, fix="name another file")


def choose_threads(config: Config) -> None:
    """Sets the number of threads before torch reads it at its import; the user's own setting wins."""
    if wants_one_thread(config):
        os.environ.setdefault(THREADS, "1")


def _packages(config: Config, machine: Machine) -> None:
    rollout = config.actor_rollout_ref.rollout.name
    package = engine_kind(rollout).package
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
        package = LOGGERS[logger].package
        if package and not machine.has(package):
            raise UserError(
                f"needs {package}",
                key="trainer.logger",
                value=logger,
                fix=f"{install_command(package)}, or leave it out of trainer.logger",
            )


def _processes(config: Config, machine: Machine) -> None:
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


def _devices(config: Config, machine: Machine) -> None:
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


def _folder(key: str, path: str | None) -> None:
    """Refuses a model's folder that is not there. A name of two parts is the hub's, unless the first is a folder
    here or the one that runs are written to."""
    path = path or ""
    first, _, rest = path.partition("/")
    here = bool(rest) and (first == RUNS or os.path.isdir(first))
    local = here or path.startswith(("/", ".", "~")) or path.count("/") > 1 or os.path.isfile(path)
    if local and not path.startswith(BUILTIN) and not os.path.isdir(path):
        raise missing_folder(key, path, "check the path, or give a hub name")
