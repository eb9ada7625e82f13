"""`paddock export`: a checkpoint becomes a folder of safetensors and tokenizer that `transformers` loads directly."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddock.errors import UserError

ACTOR, CONFIG, KEY, OUT = "actor", "config.json", "CHECKPOINT", "OUT"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
TOKENIZER_KEYS = ("data.tokenizer", "actor_rollout_ref.model.tokenizer_path", "actor_rollout_ref.model.path")
DTYPES = ("bf16", "fp32")


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="paddock export", allow_abbrev=False)
    parser.add_argument(
        "checkpoint", type=Path, help="global_step_N, its actor folder, or a run (its newest checkpoint)"
    )
    parser.add_argument("out", type=Path, help="folder to write, which must not be there yet")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: the one the model computed in)")
    parser.add_argument(
        "--max-shard-size", default="5GB", help="a larger model is cut into several files (default: 5GB)"
    )
    options = parser.parse_args(argv)
    source = export(options.checkpoint.expanduser(), options.out.expanduser(), options.dtype, options.max_shard_size)
    size = sum(file.stat().st_size for file in options.out.expanduser().iterdir())
    print(f"{source} -> {options.out} ({size / 1e6:,.1f} MB)")
    return 0


def export(checkpoint: Path, out: Path, dtype: str | None = None, max_shard_size: str = "5GB") -> Path:
    """Writes `out` whole or not at all; returns the folder that was read."""
    actor = find_actor(checkpoint)
    from transformers import AutoTokenizer

    from paddock.core.device import DTYPES as TYPES
    from paddock.models.load import load_causal_lm, load_config, model_folder
    from paddock.models.save import whole_folder

    with whole_folder(out, OUT) as writing:
        wanted = TYPES[dtype] if dtype else load_config(str(actor), key=KEY).dtype
        model = load_causal_lm(str(actor), dtype=wanted, key=KEY)
        model.save_pretrained(writing, max_shard_size=max_shard_size)
        AutoTokenizer.from_pretrained(model_folder(tokenizer_path(actor), KEY)).save_pretrained(writing)
    return actor


def find_actor(folder: Path) -> Path:
    """The folder of the policy's weights in what the user named, known to be whole."""
    from paddock.trainer.checkpoint import NAME, CheckpointStore, find_damage

    if (folder / CONFIG).is_file():
        step, actor = folder.parent, folder
    elif (folder / ACTOR / CONFIG).is_file():
        step, actor = folder, folder / ACTOR
    else:
        newest = CheckpointStore(folder).newest() if folder.is_dir() else None
        if newest is None:
            raise UserError(
                "there is no checkpoint" if folder.is_dir() else "no such folder",
                key=KEY,
                value=folder,
                fix="name trainer.default_local_dir of a run, a global_step_N in it, or the actor folder of one",
            )
        step, actor = newest.folder, newest.folder / ACTOR
    if NAME.fullmatch(step.absolute().name) and (problem := find_damage(step)):
        raise UserError(f"is damaged: {problem}", key=KEY, value=step, fix="export another step, or restore the files")
    require_policy(actor)
    return actor


def require_policy(actor: Path) -> None:
    from paddock.models.value_head import HEAD_FILE

    if (actor / HEAD_FILE).is_file():
        raise UserError(
            "is a critic, not a language model", key=KEY, value=actor, fix="name the actor folder beside it"
        )


def tokenizer_path(actor: Path) -> str:
    """Beside the weights; else where the run had it from."""
    if any((actor / name).is_file() for name in TOKENIZER_FILES):
        return str(actor)
    from paddock.trainer.state import READABLE, load_state

    config: dict[str, Any] = load_state(actor.parent)["config"] if (actor.parent / READABLE).is_file() else {}
    found = next((config[key] for key in TOKENIZER_KEYS if config.get(key)), None)
    if found is None:
        raise UserError(
            "has no tokenizer, and does not say where the run had it from",
            key=KEY,
            value=actor,
            fix="copy tokenizer.json and tokenizer_config.json of the model into it",
        )
    return str(found)
