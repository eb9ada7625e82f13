"""Defaults of the `verl` in a checkout, which its launch scripts count on without a key, beside the schema's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from paddock.config import tree
from paddock.errors import UserError
from paddock.facts.compat import CHECKOUT
from paddock.loading import foreign
from paddock.loading.overrides import flatten, read_yaml
from paddock.loading.rules.unread import set_by_user

CHANGES_TRAINING = tuple(
    foreign.keys_in(
        "algorithm.{gamma,lam,kl_*,use_kl_in_reward,norm_adv_*} "
        "@actor.{clip_ratio*,entropy_coeff,loss_agg_mode,ppo_epochs,ppo_mini_batch_size} "
        "@actor.{use_kl_loss,kl_loss_*,policy_loss.*,optim.*,shuffle} trainer.critic_warmup "
        "critic.{optim.*,cliprange_value,ppo_epochs,loss_agg_mode} @rollout.{temperature,top_k,top_p,val_kwargs.*} "
        "data.{max_prompt_length,max_response_length,train_batch_size,truncation} "
        "trainer.{total_epochs,test_freq,val_before_train} reward_model.reward_manager"
    )
)
"""Keys whose defaults decide what a run trains on, and how long."""
PAYS_KL = re.compile(
    r"^\s*if not self\.config\.actor_rollout_ref\.actor\.(use_kl_loss\b|get\(.use_kl_loss)", re.MULTILINE
)
"""Line of a trainer that pays KL in the reward whenever no KL is in the loss: verl before `use_kl_in_reward`."""


ACTOR, PAID, COEFFICIENT = "actor_rollout_ref.actor", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"


def differences(value_of: Callable[[str], Any], origins: Mapping[str, str]) -> Iterator[str]:
    """Yields a warning for each default of the checkout's `verl` that differs here, with the key that restores it."""
    package = Path(os.path.relpath(os.environ[CHECKOUT]))
    user = {key for key, origin in origins.items() if set_by_user(origin)}
    without_kl = not (value_of(f"{ACTOR}.use_kl_loss") or value_of(PAID))
    if without_kl and PAID not in user and value_of(COEFFICIENT) and pays_kl(package):
        yield (
            f"KL in the reward is not paid here; {package} pays it ({COEFFICIENT}={value_of(COEFFICIENT):g}) "
            f"whenever use_kl_loss is off: {PAID}=True restores it"
        )
    name = "ppo_megatron_trainer" if value_of(f"{ACTOR}.strategy") == "megatron" else "ppo_trainer"
    files = [package / "trainer" / "config" / f"{kind}{name}.yaml" for kind in ("_generated_", "")]
    file = next((file for file in files if file.is_file()), None)
    for key, value in defaults_of(file).items() if file else ():
        matters = key not in user and any(fnmatchcase(key, pattern) for pattern in CHANGES_TRAINING)
        if matters and differs(value_of, key, value):
            yield f"{key} is {value_of(key)} here and {value} in {file}: {key}={value} restores it"


def defaults_of(file: Path) -> dict[str, Any]:
    """Returns the values of a config file of verl's by the names of the schema, without those that refer to others."""
    try:
        written = dict(flatten(read_yaml(file), ""))
    except UserError:
        return {}
    values: dict[str, Any] = {}
    for key, value in written.items():
        try:
            values |= dict(foreign.translate(key, value, written)[0])
        except UserError:
            continue  # a feature of its own, whose key would be refused
    plain = {key: value for key, value in values.items() if isinstance(value, bool | int | float | str)}
    return {key: value for key, value in plain.items() if "$" not in str(value) and key in tree.leaves()}


def differs(value_of: Callable[[str], Any], key: str, value: Any) -> bool:
    """True if the run has another value. An unset key of the schema follows others, which are compared themselves."""
    ours = value_of(key)
    unread = key.startswith("critic.") and not value_of("critic.enable")
    return ours is not None and not unread and ours != value and str(ours) != str(value)


def pays_kl(package: Path) -> bool:
    trainer = package / "trainer" / "ppo" / "ray_trainer.py"
    return trainer.is_file() and bool(PAYS_KL.search(trainer.read_text(errors="replace")))
