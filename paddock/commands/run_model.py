"""A run where a command asks for a model: its newest whole checkpoint, a global_step_N, or the actor folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddock.commands.keys_of import Command
from paddock.config.paths import expand
from paddock.errors import UserError
from paddock.loading.overrides import FLAGS
from paddock.runs.reading import settings_at

_M = "actor_rollout_ref.model"
MODEL, ADAPTER, TOKENIZER = f"{_M}.path", f"{_M}.lora_adapter_path", f"{_M}.tokenizer_path"
DTYPE = "actor_rollout_ref.rollout.dtype"
CONFIG = "config.json"


def with_run(command: Command, arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with a run's folder replaced by its policy: a model, or a base model and its adapter, in
    the type in which the run's rollout computed.

    The first argument that is neither a flag nor key=value is the model.
    """
    before = ["", *arguments]  # a flag's value is no model
    bare = next(
        (text for flag, text in zip(before, arguments, strict=False)
         if flag not in FLAGS and text and "=" not in text and text[0] not in "-+~"), None,
    )  # fmt: skip
    overrides = [f"{MODEL}={written(text)}" if text is bare else text for text in arguments]
    named = {key: value for key, _, value in (command.translate(text).lstrip("+").partition("=") for text in overrides)}
    path = expand(named.get(MODEL, "").strip("'\""))
    if not path or not Path(path).is_dir():
        return overrides
    settings = {MODEL: path} if (Path(path) / CONFIG).is_file() else policy(path)
    actor = Path(settings.get(ADAPTER, settings[MODEL])).absolute()
    if dtype := settings_at(actor.parent).get(DTYPE):
        settings[DTYPE] = dtype
    settings = {key: value for key, value in settings.items() if key not in named or (key == MODEL and value != path)}
    return [*overrides, *(f"++{key}={written(value)}" for key, value in settings.items())]


def policy(path: str) -> dict[str, Any]:
    """Returns the settings that load a run's policy: its weights, its tokenizer, its adapter."""
    from paddock.commands.export import (
        OVERRIDES,
        REMOTE_CODE,
        TOKENIZER_KEYS,
        base_model,
        find_actor,
        tokenizer_folder,
    )

    try:
        actor = find_actor(Path(path))
    except UserError as error:
        damaged = error.reason.startswith("is damaged")
        fix = "name another step, or restore the files" if damaged else error.fix
        raise UserError(error.reason, key=MODEL, value=error.value, fix=fix) from None
    if (actor / CONFIG).is_file():
        return {MODEL: str(actor), TOKENIZER: str(tokenizer_folder(actor))}
    base, config = base_model(actor), settings_at(actor.parent)
    tokenizer = next((config[key] for key in TOKENIZER_KEYS if key != MODEL and config.get(key)), None)
    return {
        MODEL: base["path"],
        ADAPTER: str(actor),
        REMOTE_CODE: base["trust_remote_code"],
        **({TOKENIZER: tokenizer} if tokenizer else {}),
        **{f"{OVERRIDES}.{name}": value for name, value in (base["override_config"] or {}).items()},
    }


def written(value: Any) -> str:
    """Returns a value in the grammar of overrides."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{written(item)}' for name, item in value.items())}}}"
    if isinstance(value, str) and not re.fullmatch(r"[\w./:-]+", value, re.ASCII):
        return "'" + value.replace("'", "\\'") + "'"
    return "null" if value is None else str(value)
