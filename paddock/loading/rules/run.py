"""Rules on a run: its loggers and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from paddock.config import tree
from paddock.config.loggers import LOGGERS
from paddock.config.schema import Config
from paddock.loading.rules.form import Breach, rule
from paddock.loading.rules.limits import unknown


@rule
def loggers_are_known(config: Config) -> None:
    value = config.trainer.logger
    for name in value if isinstance(value, list) else [value]:
        if str(name) not in LOGGERS:
            raise unknown("logger", "trainer.logger", str(name), LOGGERS)


@rule
def resume_path_is_a_step(config: Config) -> Iterator[Breach]:
    trainer, key = config.trainer, "trainer.resume_from_path"
    if trainer.resume_mode == "resume_path" and "global_step_" not in str(trainer.resume_from_path):
        yield key, "resume_mode=resume_path needs the folder of a step", f"{key}=checkpoints/.../global_step_N"


PARTS = ("model", "optimizer", "extra")
"""Parts of a checkpoint: with less, a run would not go on as if it had not stopped."""


@rule
def checkpoints_are_read_whole(config: Config) -> Iterator[Breach]:
    for role in ("actor_rollout_ref.actor", "critic"):
        read = tree.get(config, key := f"{role}.checkpoint.load_contents")
        if read is not None and (missing := set(PARTS) - set(read)):
            fix = f"{key}=[{','.join(PARTS)}]; to start anew from its weights: `paddock export`"
            yield key, f"a checkpoint is read whole, and {min(missing)} is left out", fix
