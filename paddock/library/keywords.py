"""The keywords of `Run` and the keys that they stand for: one table, which the signature, the docs and `Run` read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

from paddock.config import tree
from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.loading import trl
from paddock.loading.overrides import PROGRAM

_A, _M, _RO = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"


class Keywords(TypedDict, total=False):
    """Keywords of `Run` that set one key each; any other key goes through `config`."""

    n: int
    lr: float
    batch: int
    mini_batch: int
    steps: int
    epochs: int
    prompt_length: int
    response_length: int
    temperature: float
    top_p: float
    stop: Sequence[str]
    clip: float
    entropy: float
    lora_rank: int
    engine: str
    dtype: str
    device: str
    devices: int
    nodes: int
    seed: int
    folder: str
    name: str
    project: str
    logger: Sequence[str]
    save_every: int
    validate_every: int
    validate_first: bool
    reward_timeout: float


KEYS: dict[str, str] = {
    "n": f"{_RO}.n",
    "lr": f"{_A}.optim.lr",
    "batch": "data.train_batch_size",
    "mini_batch": f"{_A}.ppo_mini_batch_size",
    "steps": "trainer.total_training_steps",
    "epochs": "trainer.total_epochs",
    "prompt_length": "data.max_prompt_length",
    "response_length": "data.max_response_length",
    "temperature": f"{_RO}.temperature",
    "top_p": f"{_RO}.top_p",
    "stop": f"{_RO}.stop",
    "clip": f"{_A}.clip_ratio",
    "entropy": f"{_A}.entropy_coeff",
    "lora_rank": f"{_M}.lora_rank",
    "engine": f"{_RO}.name",
    "dtype": f"{_RO}.dtype",
    "device": "trainer.device",
    "devices": "trainer.n_gpus_per_node",
    "nodes": "trainer.nnodes",
    "seed": "trainer.seed",
    "folder": "trainer.default_local_dir",
    "name": "trainer.experiment_name",
    "project": "trainer.project_name",
    "logger": "trainer.logger",
    "save_every": "trainer.save_freq",
    "validate_every": "trainer.test_freq",
    "validate_first": "trainer.val_before_train",
    "reward_timeout": "reward_model.timeout",
}
"""Keyword -> key. `batch` is prompts of a step; `n` responses to each of them."""


ARGUMENTS = {"model": f"{_M}.path", "data": "data.train_files", "validation": "data.val_files",
             "reward": "custom_reward_function.path", "environment": "environment"}  # fmt: skip
"""Arguments of `Run` that are no keywords of this table -> the key that each sets."""


def settings_of(keywords: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys and values; a key of `config` may be dotted, or a section with a mapping."""
    for name in keywords:
        if name not in KEYS:
            fix = f"{suggest(name, sorted(KEYS))}; any key of a config goes through config={{'a.b': value}}"
            raise UserError("is no keyword", key=PROGRAM, value=name, fix=of_trl(name) or fix)
    found = {KEYS[name]: value for name, value in keywords.items() if value is not None}
    for key, value in dotted(config):
        if key in found:
            by = next(
                (f"by {name}= as well" for name in keywords if KEYS[name] == key and keywords[name] is not None),
                "twice",
            )
            raise UserError(f"is set {by}", key=key, value=value, fix="set it once")
        found[key] = value
    return found


def of_trl(name: str) -> str | None:
    """Returns what says how an argument of TRL's is given here, None for a name that TRL does not have."""
    key = trl.key_of(name)
    if key is None:
        return None
    here = next((word for word, own in {**ARGUMENTS, **KEYS}.items() if own == key), None)
    how = f"{here}=" if here else f"config={{'{key}': value}}"
    return f"TRL's {name} is {how} here; docs/en/from_trl.md says which values it takes"


def dotted(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """Yields keys with all their dots, and values, of a config whose sections may be mappings."""
    if not isinstance(config, Mapping):
        fix = "a mapping of keys and values: config={'a.b': value}"
        raise UserError("is no mapping", key="config", value=f"{config!r:.80}", fix=fix)
    for name, value in config.items():
        key = f"{section}{name}"
        if isinstance(value, Mapping) and key in tree.sections():
            yield from dotted(value, f"{key}.")
        else:
            yield key, value
