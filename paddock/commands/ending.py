"""The last lines of a command that trains: what the run achieved, its report, how it ended, where the model is, and
what to type next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from paddock.commands.guard import INTERRUPTED, say_last
from paddock.commands.run_model import written
from paddock.config import tree
from paddock.config.schema import TrainerConfig
from paddock.config.secrets import masked
from paddock.loading.load import Loaded
from paddock.report.page import conclude_run
from paddock.trainer.lifecycle import Outcome, resume_command
from paddock.trainer.run import RunKind
from paddock.trainer.supervised import EXPORT

LONGEST = "data.max_prompt_length"
EVALUATED = (
    *("data.prompt_key", "data.answer_key", "data.reward_fn_key"),
    *("data.apply_chat_template", "data.apply_chat_template_kwargs"),
    *("custom_reward_function.*", "reward", "reward_kwargs", "reward_weights", "environment", "environment_kwargs"),
    *("actor_rollout_ref.rollout.multi_turn.*", "actor_rollout_ref.rollout.agent.*"),
)
"""Patterns of the keys without which the same files are read, answered or scored otherwise."""


def supervised(kind: RunKind, loaded: Loaded, next_commands: Callable[[str], list[str]]) -> int:
    """Trains on answers or on pairs; `next_commands` are for the folder of the model."""
    trainer = loaded.config.trainer
    outcome, model = kind.train(loaded.config, loaded.origins), Path(trainer.default_local_dir) / EXPORT
    return conclude(outcome, trainer, model, next_commands(str(model)))


def conclude(outcome: Outcome, trainer: TrainerConfig, model: Path | None, next_commands: Sequence[str]) -> int:
    """Writes the report of a run, prints its summary and how it ended, and returns the exit code of its command.

    `model` is the folder of the trained model, None if none was saved; `next_commands` are for people who have it.
    """
    has_steps = outcome.finished or outcome.checkpoint is not None
    summary = conclude_run(Path(trainer.default_local_dir)) if has_steps else []
    say_last("\n".join([*summary, *last_lines(outcome, trainer, model, next_commands)]))
    return 0 if outcome.finished else INTERRUPTED


def last_lines(outcome: Outcome, trainer: TrainerConfig, model: Path | None, next_commands: Sequence[str]) -> list[str]:
    folder = trainer.default_local_dir
    if not outcome.finished and outcome.checkpoint is None:
        return ["Stopped before the first step was done: there is nothing to save."]
    if not outcome.finished:
        return [f"Stopped, with a checkpoint in {folder}. {resume_command(trainer)} goes on from there."]
    if trainer.val_only:
        return [f"Validated; nothing was trained (trainer.val_only=True). Metrics: {folder}/metrics.jsonl"]
    if outcome.trained == 0:
        ended = nothing_trained(outcome, trainer)
    else:
        ended = f"Done: {outcome.trained:,} steps of {outcome.total:,}. Metrics: {folder}/metrics.jsonl"
    if model is None:
        return [ended, "No model was saved: trainer.save_last=False."]
    return [ended, f"The model is in {model}", "Next: " + "\n      ".join(next_commands)]


def nothing_trained(outcome: Outcome, trainer: TrainerConfig) -> str:
    """Says that the run was complete before this command, and which keys make it train."""
    total = outcome.total
    held = max(total, outcome.checkpoint.step if outcome.checkpoint else 0)
    limits = {"total_training_steps": trainer.total_training_steps and 2 * held,
              "total_epochs": trainer.total_epochs and 2 * trainer.total_epochs}  # fmt: skip
    further = " ".join(f"trainer.{name}={value}" for name, value in limits.items() if value)
    end = f"of {total:,}" if held == total else f"already, and this command ends with step {total:,}"
    return (
        f"Nothing was trained: {trainer.default_local_dir} holds step {held:,} {end}.\n"
        f"  to train further: {further}\n"
        "  to train anew: another trainer.experiment_name, or trainer.resume_mode=disable"
    )


def after_training(outcome: Outcome, settings: Mapping[str, Any]) -> tuple[Path | None, list[str]]:
    """Returns the folder of a policy that reinforcement learning trained, and the commands that use it."""
    if outcome.checkpoint is None:
        return None, []
    actor = outcome.checkpoint.folder / "actor"
    commands = [f"paddock export {shlex.quote(str(outcome.checkpoint.folder))} FOLDER"]
    if any(actor.glob("model*.safetensors")):
        commands.insert(0, evaluation(actor, settings))
    return actor, commands


def evaluation(model: Path, settings: Mapping[str, Any]) -> str:
    """Returns the command that evaluates the model on the run's validation data with its scorer and environment."""
    files = settings["data.val_files"] or settings["data.train_files"]
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    read = [key for key in settings if any(fnmatchcase(key, name) for name in EVALUATED)]
    changed = [key for key in read if settings[key] != tree.default_of(key)]
    if settings[LONGEST] > tree.default_of(LONGEST):
        changed.insert(0, LONGEST)
    given = {"model": str(model), "data": files, "data.max_response_length": settings["data.max_response_length"]}
    given |= {key: settings[key] for key in changed}
    return " ".join(["paddock eval", *(setting(key, value) for key, value in given.items())])


def setting(key: str, value: Any) -> str:
    """Returns an override as a shell takes it, with *** for a secret."""
    text = f"{key}={written(masked(value))}"
    if re.fullmatch(r"[\w./:=,\[\]-]+", text, re.ASCII):
        return text
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'
