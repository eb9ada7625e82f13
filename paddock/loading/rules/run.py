"""Rules on a run: how often it saves and validates, its loggers and checkpoints."""

from __future__ import annotations

import difflib

from paddock.config import tree
from paddock.config.loggers import LOGGERS
from paddock.config.schema import Config
from paddock.errors import UserError
from paddock.loading.rules.form import rule


@rule
def frequencies_are_positive_or_off(config: Config) -> None:
    for name in ("test_freq", "save_freq"):
        if getattr(config.trainer, name) == 0:
            reason = "must be a positive number of steps, or -1 for never"
            raise UserError(reason, key=f"trainer.{name}", value=0, fix=f"trainer.{name}=20")


@rule
def loggers_are_known(config: Config) -> None:
    value = config.trainer.logger
    for name in value if isinstance(value, list) else [value]:
        if str(name) not in LOGGERS:
            nearest = difflib.get_close_matches(str(name), LOGGERS, n=1)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            raise UserError(
                "no such logger", key="trainer.logger", value=name, fix=f"{hint}known: {', '.join(LOGGERS)}"
            )


@rule
def resume_path_is_a_step(config: Config) -> None:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and "global_step_" not in str(trainer.resume_from_path):
        raise UserError(
            "resume_mode=resume_path needs the folder of a step",
            key="trainer.resume_from_path",
            value=trainer.resume_from_path,
            fix="trainer.resume_from_path=checkpoints/.../global_step_N",
        )


PARTS = ("model", "optimizer", "extra")
"""Parts of a checkpoint: with less, a run would not go on as if it had not stopped."""


@rule
def checkpoints_are_whole(config: Config) -> None:
    """Refuses parts that do not exist, and to read less than was saved."""
    known = (*PARTS, "hf_model")
    for role in ("actor_rollout_ref.actor", "critic"):
        for name in ("save_contents", "load_contents"):
            key = f"{role}.checkpoint.{name}"
            value = tree.get(config, key)
            for word in value or ():
                if word not in known:
                    raise UserError("no such part", key=key, value=word, fix=f"some of {', '.join(known)}")
            if value is not None and name == "load_contents" and not set(PARTS) <= set(value):
                missing = next(part for part in PARTS if part not in value)
                raise UserError(
                    f"a checkpoint is read whole, and {missing} is left out",
                    key=key,
                    value=list(value),
                    fix=f"{key}=[{','.join(PARTS)}]; to start anew from its weights: `paddock export`",
                )
