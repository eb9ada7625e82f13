"""The keywords of `Run` and the keys that they stand for: one table, which the signature, the docs and `Run` read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypedDict, get_type_hints

from paddock.config import tree
from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.loading import trl
from paddock.loading.overrides import PROGRAM

_A, _M, _RO = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"


class Keywords(TypedDict, total=False):
    """Keywords of `Run`, each with the key that it sets; any other key goes through `config`. `batch` is prompts of a
    step; `n` responses to each of them."""

    n: Annotated[int, f"{_RO}.n"]
    lr: Annotated[float, f"{_A}.optim.lr"]
    batch: Annotated[int, "data.train_batch_size"]
    mini_batch: Annotated[int, f"{_A}.ppo_mini_batch_size"]
    steps: Annotated[int, "trainer.total_training_steps"]
    epochs: Annotated[int, "trainer.total_epochs"]
    prompt_length: Annotated[int, "data.max_prompt_length"]
    response_length: Annotated[int, "data.max_response_length"]
    temperature: Annotated[float, f"{_RO}.temperature"]
    top_p: Annotated[float, f"{_RO}.top_p"]
    stop: Annotated[Sequence[str], f"{_RO}.stop"]
    clip: Annotated[float, f"{_A}.clip_ratio"]
    entropy: Annotated[float, f"{_A}.entropy_coeff"]
    lora_rank: Annotated[int, f"{_M}.lora_rank"]
    engine: Annotated[str, f"{_RO}.name"]
    dtype: Annotated[str, f"{_RO}.dtype"]
    device: Annotated[str, "trainer.device"]
    devices: Annotated[int, "trainer.n_gpus_per_node"]
    nodes: Annotated[int, "trainer.nnodes"]
    seed: Annotated[int, "trainer.seed"]
    folder: Annotated[str, "trainer.default_local_dir"]
    name: Annotated[str, "trainer.experiment_name"]
    project: Annotated[str, "trainer.project_name"]
    logger: Annotated[Sequence[str], "trainer.logger"]
    save_every: Annotated[int, "trainer.save_freq"]
    validate_every: Annotated[int, "trainer.test_freq"]
    validate_first: Annotated[bool, "trainer.val_before_train"]
    reward_timeout: Annotated[float, "reward_model.timeout"]


_HINTS = get_type_hints(Keywords, include_extras=True)
KEYS: dict[str, str] = {name: kind.__metadata__[0] for name, kind in _HINTS.items()}
"""Keyword -> key."""
ARGUMENTS = {"model": f"{_M}.path", "data": "data.train_files", "validation": "data.val_files",
             "reward": "custom_reward_function.path", "environment": "environment"}  # fmt: skip
"""Arguments of `Run` that are no keywords of this table -> the key that each sets."""


def settings_of(keywords: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keys and values; a key of `config` may be dotted, or a section with a mapping."""
    for name in keywords:
        if name not in KEYS:
            fix = f"{suggest(name, sorted(KEYS))}; any key of a config goes through config={{'a.b': value}}"
            raise UserError("is no keyword", key=PROGRAM, value=name, fix=of_trl(name) or fix)
    settings = {KEYS[name]: value for name, value in keywords.items() if value is not None}
    for key, value in dotted(config):
        if key in settings:
            by = next(
                (f"by {name}= as well" for name in keywords if KEYS[name] == key and keywords[name] is not None),
                "twice",
            )
            raise UserError(f"is set {by}", key=key, value=value, fix="set it once")
        settings[key] = value
    return settings


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
