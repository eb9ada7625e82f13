"""Before training starts: is everything here that the config names? Checked without importing anything heavy."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from paddock.config import tree
from paddock.config.conversations import files_named
from paddock.config.distillation import teachers_of
from paddock.config.paths import BUILTIN, files_of, missing_file, missing_folder
from paddock.config.schema import Config
from paddock.config.topology import THREADS, wants_one_thread
from paddock.environments.calls import format_of
from paddock.errors import FIX, UserError
from paddock.facts.files import TRUTH, columns_of, is_here, prompt_column, sources, without_prompts
from paddock.facts.machine import Machine, this_machine
from paddock.loading import rules
from paddock.loading.load import Loaded
from paddock.loading.rules import Scope, rule
from paddock.plan.arithmetic import require_files
from paddock.runs.lock import require_free

log = logging.getLogger("paddock")

_M = "actor_rollout_ref.model"
MODEL_FOLDERS = (f"{_M}.path", f"{_M}.tokenizer_path", f"{_M}.lora_adapter_path", "data.tokenizer",
                 "critic.model.path")  # fmt: skip
RUNS = tree.default_of("trainer.default_local_dir").partition("/")[0]
OUTPUT_FOLDERS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")


def begin(loaded: Loaded, alone: bool = False) -> None:
    """Refuses a run that would not start, then shows the run's messages on stderr, first those about its settings.
    Torch is imported after it. `alone`: the command is `sft` or `rm train`, which train one model."""
    check(loaded.config, alone=alone)
    if not alone:
        require_prompts(loaded.config)
    announce(loaded)
    log.setLevel(logging.INFO)  # other libraries only report problems
    log.info("importing torch and transformers")


def announce(loaded: Loaded) -> None:
    """Shows what loading has to say, and sets the number of threads before torch reads it at its import. The user's
    own number wins."""
    for warning in loaded.warnings:
        log.warning(warning)
    if wants_one_thread(loaded.config):
        os.environ.setdefault(THREADS, "1")


def check(config: Config, machine: Machine | None = None, alone: bool = False) -> None:
    """Raises the first reason why this run would not start here. `alone`: see `begin`."""
    rules.require(config, Scope.TRAINING, Scope.SCORING, *[Scope.ALONE] if alone else [])
    check_paths(config)
    if config.reward_model.enable:
        _folder("reward_model.model.path", config.reward_model.model.path)
    rules.require(config, Scope.MACHINE, machine=machine or this_machine())
    require_free(config.trainer.default_local_dir)


@rule(Scope.TRAINING)
def tool_files_can_be_read(config: Config) -> None:
    """Refuses entries of YAML files in verl's form that no run takes. A planned script's files may be elsewhere."""
    files = config.actor_rollout_ref.rollout.multi_turn
    named = [path for path in (files.tool_config_path, files.interaction_config_path) if path]
    if not any(os.path.isfile(path) for path in named):
        return
    from paddock.verl.tools import interaction_entries, tool_entries  # with asyncio, for the few who ask

    for path, read in ((files.tool_config_path, tool_entries), (files.interaction_config_path, interaction_entries)):
        if path and os.path.isfile(path):
            read(path)


@rule(Scope.TRAINING)
def tool_calls_have_a_format(config: Config) -> None:
    if not config.actor_rollout_ref.model.external_lib:  # which may add formats
        format_of(config.actor_rollout_ref.rollout.multi_turn.format, template=None)


def refusals(config: Config, *scopes: Scope) -> list[str]:
    """Returns what a plan says of the rules of these scopes that training would not pass."""
    found = list[str]()
    for scope in scopes:
        says = "does not start on this machine" if scope is Scope.MACHINE else "refuses it"
        found += [f"training {says}: {error}" for error in rules.broken(config, scope, machine=this_machine())]
    return [text.replace(FIX, "; fix: ") for text in found]


def check_paths(
    config: Config, splits: Sequence[str] = ("train", "val"), outputs: Sequence[str] = OUTPUT_FOLDERS
) -> None:
    """Checks model folders, data files of these splits, and the folders that these keys name to write into."""
    for key in MODEL_FOLDERS:  # what the user named comes before what a default asks for
        if config.critic.enable or not key.startswith("critic."):
            _folder(key, tree.get(config, key))
    for teacher in teachers_of(config.distillation):
        _folder(teacher.setting, teacher.path)
    require_files(config.data, splits)
    for key, value, file in files_named(config.actor_rollout_ref.rollout, config.environment):
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


def require_writable_file(key: str, file: Path, config: Config) -> None:
    """Refuses a file that cannot be written, or that holds the rows that the same command reads."""
    if os.path.isdir(file):
        raise UserError("is a folder, not a file", key=key, value=file, fix=f"name a file: {key}={file}/FILE")
    require_writable(key, file.absolute().parent)
    read = map(os.path.expanduser, files_of(config.data.val_files))
    if any(os.path.exists(name) and file.exists() and os.path.samefile(name, file) for name in read):
        raise UserError("is a file of rows that this command reads", key=key, value=file, fix="name another file")


def _folder(key: str, path: str | None) -> None:
    """Refuses a model's folder that is not there. A name of two parts is the hub's, unless the first is a folder
    here or the one that runs are written to."""
    path = path or ""
    first, _, rest = path.partition("/")
    here = bool(rest) and (first == RUNS or os.path.isdir(first))
    local = here or path.startswith(("/", ".", "~")) or path.count("/") > 1 or os.path.isfile(path)
    if local and not path.startswith(BUILTIN) and not os.path.isdir(path):
        raise missing_folder(key, path, "check the path, or give a hub name")
