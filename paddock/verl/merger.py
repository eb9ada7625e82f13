"""`python -m verl.model_merger`: a checkpoint as a folder that transformers loads, of Paddock's or of verl's FSDP."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paddock.commands.guard import PLAN_ONLY, guarded
from paddock.core.options import Options
from paddock.errors import UserError

LOCAL, TARGET = "--local_dir", "--target_dir"
HUGGING_FACE = "huggingface"
"""The folder of a verl checkpoint with the config and the tokenizer."""


def run(arguments: list[str]) -> int:
    parser = Options(prog="verl.model_merger")
    operations = parser.add_subparsers(dest="operation", required=True)
    merging = operations.add_parser("merge")
    testing = operations.add_parser("test")
    for operation in (merging, testing):
        operation.add_argument("--backend", required=True, choices=("fsdp", "megatron"))
        operation.add_argument(LOCAL, type=Path, required=True, help="global_step_N/actor")
        operation.add_argument("--trust-remote-code", action="store_true")
        operation.add_argument("--tie-word-embedding", action="store_true")
        operation.add_argument("--is-value-model", action="store_true")
        operation.add_argument("--use_cpu_initialization", action="store_true")
    merging.add_argument(TARGET, type=Path, default=Path("tmp"), help="folder to write, which must not be there yet")
    merging.add_argument("--hf_upload_path")
    merging.add_argument("--private", action="store_true")
    testing.add_argument("--test_hf_dir", type=Path)
    options = parser.parse_args(arguments)
    if options.operation == "test":
        raise UserError("compares two models", key="verl.model_merger test", fix="merge, and load the folder it writes")
    if options.hf_upload_path:
        fix = f"leave it out, and run `hf upload {options.hf_upload_path} {options.target_dir}`"
        raise UserError("nothing is uploaded", key="--hf_upload_path", value=options.hf_upload_path, fix=fix)
    if os.environ.get(PLAN_ONLY):
        print(f"Merge: {options.local_dir} -> {options.target_dir}, a folder that transformers loads")
        return 0
    source = merge(options.local_dir.expanduser(), options.target_dir.expanduser(), options.trust_remote_code)
    print(f"{source} -> {options.target_dir}")
    return 0


def merge(local: Path, target: Path, trust_remote_code: bool = False) -> Path:
    """Writes `target` whole or not at all; returns the folder that was read."""
    from paddock.verl.shards import shard_files

    if not local.is_dir():
        raise UserError("no such folder", key=LOCAL, value=local, fix="name global_step_N/actor of a checkpoint")
    if (local / "dist_ckpt").is_dir():
        reason = "is a distributed checkpoint of verl's Megatron engine, which needs Megatron to be read"
        raise UserError(reason, key=LOCAL, value=local, fix="merge it with the version of verl that wrote it")
    if shard_files(local):
        return merge_shards(local, target, trust_remote_code)
    from paddock.commands.export import export

    return export(local, target)


def merge_shards(local: Path, target: Path, trust_remote_code: bool) -> Path:
    """Joins the files of verl's FSDP ranks; weights are written in bfloat16, as verl does."""
    import torch

    from paddock.core.files import whole_folder
    from paddock.models.image_reader import copy_processor
    from paddock.models.load import ModelPath, empty_causal_lm, read_tokenizer
    from paddock.verl.shards import merged_shards

    described = next((folder for folder in (local / HUGGING_FACE, local) if (folder / "config.json").is_file()), None)
    if described is None:
        fix = f"put config.json and the tokenizer of the model into {local / HUGGING_FACE}"
        raise UserError("has no config.json of its model", key=LOCAL, value=local, fix=fix)
    weights = {name: value.to(torch.bfloat16) for name, value in merged_shards(local, LOCAL).items()}
    if adapter := next((name for name in weights if "lora_" in name), None):
        fix = "merge it with the version of verl that wrote it"
        raise UserError(f"holds LoRA adapters ({adapter})", key=LOCAL, value=local, fix=fix)
    model = empty_causal_lm(str(described), trust_remote_code, LOCAL)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if wrong := sorted((set(weights) ^ set(model.state_dict())) - tied):
        reason = f"its weights are not those of the model of its config.json, as {wrong[0]} shows"
        raise UserError(reason, key=LOCAL, value=local, fix="name the folder of the actor; a critic is not merged")
    with whole_folder(target, TARGET) as writing:
        model.save_pretrained(writing, state_dict=weights)
        read_tokenizer(described, ModelPath(str(described), LOCAL), trust_remote_code).save_pretrained(writing)
        copy_processor(described, writing)
    return local


def main() -> int:
    return guarded(run, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
