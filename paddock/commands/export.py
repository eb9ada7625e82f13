"""`paddock export`: a checkpoint becomes a folder of safetensors and tokenizer that `transformers` loads directly."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddock.config.paths import missing_folder
from paddock.core.options import Options
from paddock.errors import UserError
from paddock.runs.reading import settings_at

ACTOR, REWARD_MODEL, CONFIG, KEY, OUT = "actor", "reward_model", "config.json", "CHECKPOINT", "OUT"
OVERRIDES, REMOTE_CODE = "actor_rollout_ref.model.override_config", "actor_rollout_ref.model.trust_remote_code"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
TOKENIZER_KEYS = ("data.tokenizer", "actor_rollout_ref.model.tokenizer_path", "actor_rollout_ref.model.path")
DTYPES = ("bf16", "fp32")


def run(argv: Sequence[str]) -> int:
    parser = Options(prog="paddock export")
    parser.add_argument(
        "checkpoint", type=Path, help="global_step_N, its actor folder, or a run (its newest checkpoint)"
    )
    parser.add_argument("out", type=Path, help="folder to write, which must not be there yet")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: the one the model computed in)")
    parser.add_argument(
        "--max-shard-size",
        type=shard_size,
        default="5GB",
        help="a larger model is cut into several files (default: 5GB)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with LoRA the adapter alone, as peft loads it (default: merged)",
    )
    options = parser.parse_args(argv)
    folders = options.checkpoint.expanduser(), options.out.expanduser()
    source = export_adapter(*folders) if options.adapter else export(*folders, options.dtype, options.max_shard_size)
    size = sum(file.stat().st_size for file in options.out.expanduser().iterdir())
    print(f"{source} -> {options.out} ({size / 1e6:,.1f} MB)")
    return 0


def shard_size(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*\s*([KMGT]B)?", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 500MB or 5GB")
    return text


def export(checkpoint: Path, out: Path, dtype: str | None = None, max_shard_size: str = "5GB") -> Path:
    """Writes `out` whole or not at all; returns the folder that was read."""
    actor = find_actor(checkpoint)
    from paddock.core.device import DTYPES as TYPES
    from paddock.core.files import whole_folder
    from paddock.models.adapters import with_adapter
    from paddock.models.load import load_causal_lm, load_config

    source: dict[str, Any] = {"path": str(actor), "key": KEY} if (actor / CONFIG).is_file() else base_model(actor)
    if dtype and dtype not in TYPES:
        raise UserError("is no type of weights", key="dtype", value=dtype, fix=" or ".join(DTYPES))
    with whole_folder(out, OUT) as writing:
        wanted = TYPES[dtype] if dtype else load_config(**source).dtype
        model = load_causal_lm(**source, dtype=wanted)
        weights = None if (actor / CONFIG).is_file() else with_adapter(model, actor)
        model.save_pretrained(writing, state_dict=weights, max_shard_size=max_shard_size)
        save_readers(actor, writing)
    return actor


def export_adapter(checkpoint: Path, out: Path) -> Path:
    actor = find_actor(checkpoint)
    from paddock.core.files import whole_folder
    from paddock.models.adapters import CONFIG_FILE, WEIGHTS_FILE

    if not (actor / CONFIG_FILE).is_file():
        raise UserError(
            "holds a whole model: the run trained no adapter", key="--adapter", value=actor, fix="leave it out"
        )
    with whole_folder(out, OUT) as writing:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copyfile(actor / name, writing / name)
        save_readers(actor, writing)
    return actor


def base_model(actor: Path) -> dict[str, Any]:
    """Returns the base model of an adapter, as arguments of the loaders."""
    from paddock.models.adapters import CONFIG_FILE
    from paddock.models.files import ModelPath, read_json

    config, adapter = settings_at(actor.parent), read_json(actor / CONFIG_FILE, ModelPath(str(actor), KEY))
    base = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
    if not isinstance(base, str) or not base:
        reason = f"{CONFIG_FILE} has no base_model_name_or_path, the model that the adapter changes"
        raise UserError(reason, key=KEY, value=actor, fix="write the path of its base model into it")
    return {
        "path": base,
        "override_config": config.get(OVERRIDES),
        "trust_remote_code": bool(config.get(REMOTE_CODE)),
        "key": f"{KEY}: base_model_name_or_path",
    }


def find_actor(folder: Path) -> Path:
    """Returns the folder of the policy's weights in what the user named, known to be whole."""
    from paddock.models.adapters import CONFIG_FILE
    from paddock.runs.checkpoint import NAME, CheckpointStore, find_damage

    require_policy(folder / REWARD_MODEL)
    if (folder / CONFIG).is_file() or (folder / CONFIG_FILE).is_file():
        step, actor = folder.parent, folder
    elif (folder / ACTOR / CONFIG).is_file() or (folder / ACTOR / CONFIG_FILE).is_file():
        step, actor = folder, folder / ACTOR
    else:
        fix = "name trainer.default_local_dir of a run, a global_step_N in it, or the actor folder of one"
        if not os.path.isdir(folder):
            raise missing_folder(KEY, str(folder), fix)
        newest = CheckpointStore(folder).newest()
        if newest is None:
            raise UserError("there is no checkpoint", key=KEY, value=folder, fix=fix)
        require_policy(newest.folder / REWARD_MODEL)
        step, actor = newest.folder, newest.folder / ACTOR
    if NAME.fullmatch(step.absolute().name) and (problem := find_damage(step)):
        raise UserError(f"is damaged: {problem}", key=KEY, value=step, fix="export another step, or restore the files")
    require_policy(actor)
    return actor


def require_policy(folder: Path) -> None:
    """Refuses the folder of a critic or a reward model: neither is a language model."""
    from paddock.models.value_head import HEAD_FILE

    if not (folder / HEAD_FILE).is_file():
        return
    what, fix = "a critic", "name the actor folder beside it"
    if folder.name == REWARD_MODEL:
        what, fix = "a reward model", "take the folder huggingface that `paddock rm train` left, as it is"
    raise UserError(f"is {what}, not a language model", key=KEY, value=folder, fix=fix)


def save_readers(actor: Path, writing: Path) -> None:
    """Saves the tokenizer, and the image processor of a model that reads images."""
    from paddock.models.image_reader import copy_processor
    from paddock.models.load import ModelPath, read_tokenizer

    reads = tokenizer_folder(actor)
    read_tokenizer(reads, ModelPath(str(reads), KEY)).save_pretrained(writing)
    copy_processor(reads, writing)


def tokenizer_folder(actor: Path) -> Path:
    """Returns the tokenizer's folder: that of the weights, or the one from which the run loaded its tokenizer."""
    from paddock.models.load import model_folder

    if any((actor / name).is_file() for name in TOKENIZER_FILES):
        return actor
    config = settings_at(actor.parent)
    found = next((config[key] for key in TOKENIZER_KEYS if config.get(key)), None)
    if found is None:
        raise UserError(
            "has no tokenizer, and does not say where the run had it from",
            key=KEY,
            value=actor,
            fix="copy tokenizer.json and tokenizer_config.json of the model into it",
        )
    return model_folder(str(found), KEY)
