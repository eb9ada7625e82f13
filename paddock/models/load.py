"""Models and tokenizers: from a local folder, the package's own assets, or the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import LogRecord
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import logging

from paddock.config.paths import BUILTIN, missing_folder, names_in
from paddock.config.plugins import import_plugin
from paddock.config.roles import ModelConfig
from paddock.config.schema import DataConfig
from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.facts.models import ASSETS
from paddock.models.attention import NAME as PADDOCK_ATTENTION
from paddock.models.files import PICKLED, check_json, check_weights
from paddock.models.files import ModelPath as ModelPath

MODEL_KEY = "actor_rollout_ref.model.path"
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]

STYLES = re.compile(r"\x1b\[[0-9;]*m")
logging.disable_progress_bar()  # local weights are mapped at once; a bar for each of five roles says nothing


def without_styles(record: LogRecord) -> bool:
    """Takes terminal styles out of a message: transformers' report of loaded weights has some, also in a file."""
    record.msg, record.args = STYLES.sub("", record.getMessage()), None
    return True


logging.get_logger("transformers.modeling_utils").addFilter(without_styles)


def model_folder(path: str, key: str = MODEL_KEY) -> Path:
    """Returns the local folder of a model: itself, an asset for `builtin:NAME`, or the hub's cache after a download."""
    if path.startswith(BUILTIN):
        return asset_folder(path.removeprefix(BUILTIN), key)
    folder, asked = Path(path).expanduser(), ModelPath(path, key)
    if os.path.isdir(folder):
        if os.path.isfile(folder / "config.json"):
            return folder
        held = ", ".join(names_in(folder)) or "nothing that may be read"
        if "adapter_config.json" in held:
            base = f"its base model, and actor_rollout_ref.model.lora_adapter_path={path}"
            fix = f"the folder that `paddock export` makes of it; or {base}"
            raise asked.wrong("the folder holds a LoRA adapter, not a model", fix)
        fix = "name the folder that holds config.json and the weights"
        raise asked.wrong(f"the folder has no config.json: it holds {held}", fix)
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or os.path.isfile(folder):
        raise missing_folder(key, path, "check the path, or give a hub name such as Qwen/Qwen3-0.6B")
    return hub_folder(path, key)


def asset_folder(name: str, key: str) -> Path:
    folder = ASSETS / name
    if not folder.is_dir():
        known = sorted(entry.name for entry in ASSETS.iterdir() if entry.is_dir()) if ASSETS.is_dir() else []
        raise UserError("no such model in the package", key=key, value=f"{BUILTIN}{name}", fix=suggest(name, known))
    return folder


def hub_folder(name: str, key: str) -> Path:
    """Asks the hub once; where it does not answer, what an earlier run downloaded serves."""
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=[*SMALL_FILES, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            huggingface_hub.snapshot_download(name, allow_patterns=["*.bin"])
        return folder
    except GatedRepoError:
        reason = "the hub asks for permission to download it"
        fix = "accept its terms on the hub, then run `hf auth login`"
    except (RepositoryNotFoundError, HFValidationError):
        reason = "neither a local folder nor a model of the hub"
        fix = "check the name: folder/path or organisation/model"
    except (OSError, HfHubHTTPError):
        reason = "no such folder here, and the hub cannot be reached"
        fix = f"download it where there is a network, and set {key} to its folder; {BUILTIN}tiny needs no network"
    raise ModelPath(name, key).wrong(reason, fix)


def load_config(
    path: str,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    key: str = MODEL_KEY,
) -> PreTrainedConfig:
    """The model's own config with the user's changes, and without dropout: sampling has none, nor may training."""
    folder, asked = model_folder(path, key), ModelPath(path, key)
    check_json(folder, ("config.json",), asked)
    with reading("config.json", asked):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    for name, value in (override_config or {}).items():
        if not hasattr(config, name):
            raise UserError(
                f"{config.model_type} models have no such field",
                key=f"{key.rpartition('.')[0]}.override_config.{name}",
                value=value,
                fix=suggest(name, sorted(config.to_dict())),
            )
        setattr(config, name, value)
    parts = (config, config.get_text_config(), getattr(config, "vision_config", config))
    for part in {id(part): part for part in parts}.values():
        for name, value in vars(part).items():
            if name.endswith(("dropout", "pdrop", "dropout_prob")) and isinstance(value, float):
                setattr(part, name, 0.0)
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False  # what routers say is read elsewhere: see experts.py
    return config


def empty_causal_lm(path: str, trust_remote_code: bool = False, key: str = MODEL_KEY) -> PreTrainedModel:
    """Returns the model of a folder's config.json without weights: its tensors are on the meta device."""
    config = load_config(path, trust_remote_code, key=key)
    with torch.device("meta"), reading("config.json", ModelPath(path, key)):
        return class_for(config).from_config(config, trust_remote_code=trust_remote_code)


def class_for(config: PreTrainedConfig) -> Any:
    """Returns transformers' class that loads a causal language model of this config, with images or without."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM


def load_causal_lm(
    path: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    attn: str = PADDOCK_ATTENTION,
    key: str = MODEL_KEY,
    kind: Any = None,
) -> PreTrainedModel:
    """Loads a model in eval mode. On a CPU, weights stored in this type are mapped from the file, shared until written.

    `kind`: another class of transformers that loads it, for a model without the head of a language model.
    """
    config = load_config(path, trust_remote_code, override_config, key)
    folder, asked = model_folder(path, key), ModelPath(path, key)
    files = check_weights(folder, asked)
    with reading(files[0].name, asked):
        model, report = (kind or class_for(config)).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attn,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, by name
        )
    if wrong := sorted(report["mismatched_keys"]):
        name, stored, wanted = wrong[0]
        raise asked.wrong(
            f"{len(wrong)} of its tensors have another shape than its config.json says: {name} has {tuple(stored)}, "
            f"and {tuple(wanted)} is expected",
            "config.json and weights must be those of one model: download both again",
        )
    if missing := sorted(report["missing_keys"]):
        raise asked.wrong(
            f"its weights lack {len(missing)} tensors that a {config.model_type} model needs: {', '.join(missing[:3])}",
            "take a whole checkpoint of a causal language model; a fresh tensor would be random",
        )
    if attn == PADDOCK_ATTENTION and not model._supports_attention_backend:
        reason = f"the code of {type(model).__name__} does not let its attention be exchanged"
        raise asked.wrong(reason, "use a model that transformers itself implements")
    model = model.to(device).eval()
    model.tie_weights()  # on some devices what was one tensor has become two
    return model


def load_backbone(path: str, **source: Any) -> PreTrainedModel:
    """Loads a causal LM without its head, by the arguments of `load_causal_lm`."""
    return load_causal_lm(path, **source, kind=AutoModel)


@contextmanager
def reading(file: str, asked: ModelPath) -> Iterator[None]:
    """Turns whatever transformers raises while it reads a user's `file` into an error in what the file holds."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise unreadable(error, file, asked) from error


def unreadable(error: Exception, file: str, asked: ModelPath) -> UserError:
    said = str(error).split("\n") or [""]
    text = " ".join(part.strip() for part in said[: 2 if said[0].endswith(":") else 1])
    reason = f"{file} cannot be used: {type(error).__name__}{f': {text}' if text else ''}"
    fix = "the folder must hold a model that transformers can load"
    if file.startswith(PICKLED.removesuffix(".bin")):
        fix = "weights in safetensors: a pickle is read only if it holds tensors and runs no code"
    if isinstance(error, ValueError) and "trust_remote_code" in str(error):
        section = asked.key.rpartition(".")[0] or MODEL_KEY.rpartition(".")[0]
        reason, fix = "it comes with code of its own", f"{section}.trust_remote_code=True, if you trust it"
    return asked.wrong(reason, fix)


def read_tokenizer(folder: Path, asked: ModelPath, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder as it is. Without its files transformers makes one that knows no text."""
    check_json(folder, ("tokenizer.json", "tokenizer_config.json"), asked)
    with reading("the tokenizer", asked):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if set(tokenizer.get_vocab()) <= {str(token) for token in tokenizer.all_special_tokens}:
        reason = f"the folder has no tokenizer: it holds {', '.join(names_in(folder))}"
        raise asked.wrong(reason, "copy tokenizer.json and tokenizer_config.json of the model into it")
    return tokenizer


def load_tokenizer(
    path: str, trust_remote_code: bool = False, chat_template: str | None = None, key: str = MODEL_KEY
) -> PreTrainedTokenizerBase:
    """Loads a tokenizer that pads on the left; without a pad token of its own, with the end-of-sequence token."""
    asked = ModelPath(path, key)
    tokenizer = read_tokenizer(model_folder(path, key), asked, trust_remote_code)
    if tokenizer.eos_token_id is None:
        reason = "its tokenizer has no end-of-sequence token, so no response could end"
        raise asked.wrong(reason, "set eos_token in tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    tokenizer.padding_side = "left"
    return tokenizer


def open_tokenizer(model: ModelConfig, data: DataConfig) -> Any:
    """Opens the policy's tokenizer, after the module that may register models and tokenizers of its own."""
    if model.external_lib:
        import_plugin(model.external_lib, "actor_rollout_ref.model.external_lib")
    return load_tokenizer(tokenizer_path(model, data), data.trust_remote_code, model.custom_chat_template)


def tokenizer_path(model: ModelConfig, data: DataConfig) -> str:
    """Returns the folder or the hub name of the policy's tokenizer."""
    return data.tokenizer or model.tokenizer_path or model.path or ""
