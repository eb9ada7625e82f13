"""The last lines of a command that trains: what the run achieved, its report, how it ended, where the model is, and
what to type next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paddock.commands.guard import INTERRUPTED, say_last
from paddock.commands.run_model import written
from paddock.config import tree
from paddock.config.schema import Config
from paddock.config.secrets import masked
from paddock.loading.load import Loaded
from paddock.report.page import conclude_run
from paddock.trainer.lifecycle import Outcome, resume_command
from paddock.trainer.run import RunKind
from paddock.trainer.supervised import EXPORT

COLUMNS = ("prompt_key", "answer_key", "reward_fn_key", "apply_chat_template",
           "apply_chat_template_kwargs")  # fmt: skip
"""Keys of `data` without which the same files are read otherwise."""
SCORERS = frozenset({"custom_reward_function", "reward", "reward_kwargs", "reward_weights"})


def supervised(kind: RunKind, loaded: Loaded, next_commands: Callable[[str], list[str]]) -> int:
    """Trains on answers or on pairs; `next_commands` are for the folder of the model."""
    outcome = kind.train(loaded.config, loaded.origins)
    model = Path(loaded.config.trainer.default_local_dir) / EXPORT
    return conclude(outcome, loaded.config, model, next_commands(str(model)))


def conclude(outcome: Outcome, config: Config, model: Path | None, next_commands: Sequence[str]) -> int:
    """Writes the report of a run, prints its summary and how it ended, and returns the exit code of its command.

    `model` is the folder of the trained model, None if none was saved; `next_commands` are for people who have it.
    """
    has_steps = outcome.finished or outcome.checkpoint is not None
    summary = conclude_run(Path(config.trainer.default_local_dir)) if has_steps else []
    say_last("\n".join([*summary, *last_lines(outcome, config, model, next_commands)]))
    return 0 if outcome.finished else INTERRUPTED


def last_lines(outcome: Outcome, config: Config, model: Path | None, next_commands: Sequence[str]) -> list[str]:
    folder = config.trainer.default_local_dir
    if not outcome.finished and outcome.checkpoint is None:
        return ["Stopped before the first step was done: there is nothing to save."]
    if not outcome.finished:
        return [f"Stopped, with a checkpoint in {folder}. {resume_command(config.trainer)} goes on from there."]
    if config.trainer.val_only:
        return [f"Validated; nothing was trained (trainer.val_only=True). Metrics: {folder}/metrics.jsonl"]
    if outcome.trained == 0:
        ended = nothing_trained(outcome, config)
    else:
        ended = f"Done: {outcome.trained:,} steps of {outcome.total:,}. Metrics: {folder}/metrics.jsonl"
    if model is None:
        return [ended, "No model was saved: trainer.save_last=False."]
    return [ended, f"The model is in {model}", "Next: " + "\n      ".join(next_commands)]


def nothing_trained(outcome: Outcome, config: Config) -> str:
    """Says that the run was complete before this command, and which keys make it train."""
    trainer, total = config.trainer, outcome.total
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


ENVIRONMENTS = ("environment", "actor_rollout_ref.rollout.multi_turn.", "actor_rollout_ref.rollout.agent.")


def after_training(outcome: Outcome, config: Config) -> tuple[Path | None, list[str]]:
    """Returns the folder of a policy that reinforcement learning trained, and the commands that use it."""
    if outcome.checkpoint is None:
        return None, []
    actor = outcome.checkpoint.folder / "actor"
    commands = [f"paddock export {shlex.quote(str(outcome.checkpoint.folder))} FOLDER"]
    if any(actor.glob("model*.safetensors")):
        commands.insert(0, evaluation(actor, config))
    return actor, commands


def evaluation(model: Path, config: Config) -> str:
    """Returns the command that evaluates the model on the run's validation data with its scorer."""
    files = config.data.val_files or config.data.train_files
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    words = [setting("model", str(model)), setting("data", files)]
    words.append(f"data.max_response_length={config.data.max_response_length}")
    default = Config().data
    if config.data.max_prompt_length > default.max_prompt_length:
        words.append(f"data.max_prompt_length={config.data.max_prompt_length}")
    own = [name for name in COLUMNS if getattr(config.data, name) != getattr(default, name)]
    words += [setting(f"data.{name}", getattr(config.data, name)) for name in own]
    return " ".join(["paddock eval", *words, *scorer_words(config)])


def setting(key: str, value: Any) -> str:
    """Returns an override as a shell takes it, with *** for a secret."""
    text = f"{key}={written(masked(value))}"
    if re.fullmatch(r"[\w./:=,\[\]-]+", text, re.ASCII):
        return text
    return shlex.quote(text) if re.search(r'["$`\\!]', text) else f'"{text}"'


def scorer_words(config: Config) -> list[str]:
    """Returns the settings that name the run's rules and functions, its environment and tools, as a shell takes
    them."""
    chosen = [key for key in tree.leaves() if key.partition(".")[0] in SCORERS or key.startswith(ENVIRONMENTS)]
    given = {key: tree.get(config, key) for key in chosen if tree.get(config, key) != tree.get(Config(), key)}
    return [setting(key, value) for key, value in given.items()]
