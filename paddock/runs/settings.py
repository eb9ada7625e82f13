"""The settings of a run as its folder keeps them, and whether a run may go on with other ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddock.config import tree
from paddock.errors import UserError

log = logging.getLogger(__name__)

ORDER = "the order of rows and all sampling follow from it, so the run would see some prompts twice and others never"
SHAPE = "the weights and the optimizer state of the checkpoint are those of the other model"
FIXED: Mapping[str, str] = {
    "actor_rollout_ref.model.path": f"{SHAPE}, and it would become the reference",
    "actor_rollout_ref.model.lora_rank": SHAPE,
    "actor_rollout_ref.model.lora_alpha": "it scales the adapters, so the policy would jump",
    "actor_rollout_ref.model.target_modules": SHAPE,
    "actor_rollout_ref.model.exclude_modules": SHAPE,
    "critic.model.lora_rank": SHAPE,
    "critic.model.lora_alpha": "it scales the adapters, so the values would jump",
    "critic.model.target_modules": SHAPE,
    "actor_rollout_ref.actor.optim.optimizer": "the optimizer state of the checkpoint is the other optimizer's",
    "critic.optim.optimizer": "the optimizer state of the checkpoint is the other optimizer's",
    "algorithm.adv_estimator": "estimators differ in roles and in the scale of advantages",
    "data.train_batch_size": "the position in the data and the number of steps are counted in batches of that size",
    "trainer.seed": ORDER,
    "data.seed": ORDER,
    "data.shuffle": ORDER,
}
"""Keys whose change makes going on an error. A run survives any other change (responses per prompt, mini-batch size,
learning rate, data files, ...): it is reported. A model may have moved: the last part of its path counts."""

DRAWN_BY = ("n", "response_length", "temperature", "top_k", "top_p", "min_p", "do_sample", "ignore_eos", "stop",
            "min_tokens", "seed")  # fmt: skip
ASKED_BY = ("apply_chat_template", "apply_chat_template_kwargs", "max_prompt_length")
WHILE_PARTS_WAIT = dict.fromkeys(
    (
        *(f"actor_rollout_ref.rollout.{name}" for name in DRAWN_BY),
        *(f"data.{name}" for name in ASKED_BY),
        "environment",
    ),
    "it holds responses that are drawn in part under it, and the same sampling must draw their rest",
)
"""Further fixed keys of a checkpoint whose rollouts ran ahead."""

FREE = frozenset({"trainer.resume_mode", "trainer.resume_from_path"})


def check_settings(saved: Mapping[str, Any], now: Mapping[str, Any], fixed: Mapping[str, str] = FIXED) -> None:
    """Refuses a change of a fixed key and reports all other changes since the checkpoint was written."""
    changed = {key: (old, now[key]) for key, old in saved.items() if key in now and now[key] != old and key not in FREE}
    for key, reason in fixed.items():
        old, new = changed.get(key, (None, None))
        if old != new and not moved(key, old, new):
            raise UserError(
                f"the checkpoint was written with {old}: {reason}",
                key=key,
                value=new,
                fix=f"{key}={old}; for a new run: trainer.resume_mode=disable and another {name_of_folder(now)}",
            )
    if changed:
        changes = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changed.items())
        log.warning("the run goes on with settings that differ from the checkpoint's: %s", changes)


def name_of_folder(settings: Mapping[str, Any]) -> str:
    """Returns the key that gives a run another folder: that of the folder itself, if it was set."""
    named = settings["trainer.experiment_name"] in Path(settings["trainer.default_local_dir"]).parts
    return "trainer.experiment_name" if named else "trainer.default_local_dir (folder= of a Run)"


def moved(key: str, old: Any, new: Any) -> bool:
    return bool(tree.leaves()[key].metadata.get("path")) and Path(str(old)).name == Path(str(new)).name
