"""The shape of a language model: read from its config.json or a bundled table, and counted to the last parameter.

Nothing here imports torch: a plan for a model that is not on this machine must answer at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from paddock.errors import UserError
from paddock.facts.machine import cache_folder

BUILTIN = "builtin:"
"""Prefix of models and data that come with the package."""
ASSETS = Path(__file__).resolve().parent.parent / "assets"
TABLE = Path(__file__).with_name("models.json")


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions. The defaults describe a Llama: untied, no biases, two norms and one dense MLP a layer."""

    name: str
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    tied_embeddings: bool = False
    scalar_head: bool = False
    """One number a token (a reward or value model) in place of the vocabulary's logits."""
    norms_per_layer: int = 2
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_expert_intermediate: int = 0
    shared_expert_gate: bool = False
    expert_bias: bool = False
    dense_layers: int = 0
    """Layers of a mixture of experts that keep an ordinary MLP."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    """Above zero: multi-head latent attention, arXiv:2405.04434."""
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    vision_params: int = 0
    vision_depth: int = 0
    vision_width: int = 0
    vision_inner: int = 0
    vision_patches_per_token: int = 0
    """Patches that are merged into one token of the language model."""

    @property
    def parameters(self) -> int:
        """embeddings + head + layers x (attention + norms) + MLPs + final norm + vision tower."""
        layers = self.layers * self.attention_parameters + self.norms_per_layer * self.hidden * self.layers
        mlps = self.plain_layers * self.mlp_parameters + self.moe_layers * self.moe_parameters(self.experts)
        return self.embedding_parameters + layers + mlps + self.hidden + self.vision_params

    @property
    def active_parameters(self) -> int:
        """The parameters one token meets: all but the experts it is not routed to."""
        idle = self.experts - self.experts_per_token
        return self.parameters - self.moe_layers * idle * self.expert_parameters

    @property
    def multiplied_parameters(self) -> int:
        """The active parameters that one token is multiplied with: not the embedding, unless the head shares it."""
        looked_up = 0 if self.tied_embeddings and not self.scalar_head else self.vocab * self.hidden
        return self.active_parameters - looked_up

    @property
    def billions(self) -> float:
        return self.parameters / 1e9

    @property
    def embedding_parameters(self) -> int:
        """Input embedding and output head; tied, they are one matrix."""
        table = self.vocab * self.hidden
        head = self.hidden if self.scalar_head else 0 if self.tied_embeddings else table
        return table + head

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def plain_layers(self) -> int:
        return self.layers - self.moe_layers

    @property
    def attention_linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of every projection in one attention layer."""
        hidden, heads = self.hidden, self.heads
        if not self.kv_lora_rank:
            query, key = heads * self.head_dim, self.kv_heads * self.head_dim
            return (hidden, query), (hidden, key), (hidden, key), (query, hidden)
        query = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        queries = ((hidden, self.q_lora_rank), (self.q_lora_rank, query)) if self.q_lora_rank else ((hidden, query),)
        return (
            *queries,
            (hidden, self.kv_lora_rank + self.qk_rope_head_dim),
            (self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim)),
            (heads * self.v_head_dim, hidden),
        )

    @property
    def attention_parameters(self) -> int:
        weights = sum(inputs * outputs for inputs, outputs in self.attention_linears)
        biases = self.qkv_bias * (self.heads + 2 * self.kv_heads) * self.head_dim + self.output_bias * self.hidden
        norms = self.q_lora_rank + self.kv_lora_rank + self.qk_norm * 2 * self.head_dim
        return weights + biases + norms + self.attention_sinks * self.heads

    @property
    def mlp_parameters(self) -> int:
        """A gated MLP: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_parameters(self) -> int:
        biases = self.expert_bias * (2 * self.moe_intermediate + self.hidden)
        return 3 * self.hidden * self.moe_intermediate + biases

    def moe_parameters(self, experts: int) -> int:
        """Counts the parameters of a sparse layer: the router, `experts` experts, the shared expert and its gate."""
        router = self.experts * (self.hidden + self.expert_bias)
        shared = 3 * self.hidden * self.shared_expert_intermediate + self.shared_expert_gate * self.hidden
        return router + experts * self.expert_parameters + shared

    @property
    def layer_parameters(self) -> int:
        """The largest layer, the unit in which sharded weights are gathered."""
        mlps = [self.mlp_parameters] if self.plain_layers else []
        mlps += [self.moe_parameters(self.experts)] if self.moe_layers else []
        return self.attention_parameters + self.norms_per_layer * self.hidden + max(mlps, default=0)

    def lora_parameters(self, rank: int) -> int:
        """rank x (inputs + outputs) of every linear layer that gets an adapter, arXiv:2106.09685."""
        return rank * sum(count * (inputs + outputs) for count, inputs, outputs in self.adapted_linears)

    @property
    def adapted_parameters(self) -> int:
        """Counts the weights of the linear layers that get an adapter."""
        return sum(count * inputs * outputs for count, inputs, outputs in self.adapted_linears)

    @property
    def adapted_linears(self) -> list[tuple[int, int, int]]:
        """(layers, inputs, outputs) of the linear layers that get an adapter: those of the decoder.

        The head, the vision tower and routed experts (one fused tensor a layer, not linear layers) stay frozen."""
        linears = [(self.layers, inputs, outputs) for inputs, outputs in self.attention_linears]
        plain, sparse = (self.plain_layers, self.intermediate), (self.moe_layers, self.shared_expert_intermediate)
        for layers, width in (plain, sparse):
            if width:
                linears += [(layers, self.hidden, width), (layers, self.hidden, width), (layers, width, self.hidden)]
        if self.shared_expert_gate:
            linears.append((self.moe_layers, self.hidden, 1))
        return linears

    def kv_bytes_per_token(self, dtype_bytes: int = 2, *, latent: bool = True) -> int:
        """layers x (keys + values) of one token. Sliding windows are not deducted: this is the upper bound.

        Latent attention caches the compressed vector and one rotary key (`latent`), or, in engines
        that expand it as transformers does, every head's keys and values."""
        if not self.kv_lora_rank:
            width = 2 * self.kv_heads * self.head_dim
        elif latent:
            width = self.kv_lora_rank + self.qk_rope_head_dim
        else:
            width = self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim)
        return self.layers * width * dtype_bytes


@dataclass(frozen=True)
class Family:
    """What a family's code fixes and its config.json therefore does not say."""

    tied: bool = False
    norms: int = 2
    qkv_bias: bool = False
    """Always; without it the key attention_bias decides."""
    output_bias: bool = True
    """attention_bias reaches the output projection too."""
    qk_norm: bool = False
    attention_sinks: bool = False
    expert_bias: bool = False
    shared_expert_gate: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "deepseek_v3": Family(),
    "qwen2": Family(qkv_bias=True, output_bias=False),
    "qwen2_vl": Family(qkv_bias=True, output_bias=False),
    "qwen2_5_vl": Family(qkv_bias=True, output_bias=False),
    "qwen2_moe": Family(qkv_bias=True, output_bias=False, shared_expert_gate=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True),
    "qwen3_vl": Family(qk_norm=True),
    "qwen3_vl_moe": Family(qk_norm=True),
    "gemma2": Family(tied=True, norms=4),
    "gemma3": Family(tied=True, norms=4, qk_norm=True),
    "chatglm": Family(output_bias=False),
    "glm": Family(output_bias=False),
    "glm4": Family(output_bias=False, norms=4),
    "glm4v": Family(output_bias=False, norms=4),
    "glm4_moe": Family(output_bias=False),
    "gpt_oss": Family(attention_sinks=True, expert_bias=True),
    "seed_oss": Family(output_bias=False),
}
CHATGLM_KEYS = {
    "num_layers": "num_hidden_layers",
    "multi_query_group_num": "num_key_value_heads",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "intermediate_size",
    "padded_vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
    "add_qkv_bias": "attention_bias",
}
# Gemma 3 as published leaves out of its text_config what equals these.
GEMMA3_KEYS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
}


def section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


class ModelFile:
    """A config.json, flat or with a nested text_config, read with types checked."""

    def __init__(self, values: Mapping[str, Any], name: str = ""):
        """`name` is the model's, for errors."""
        self.name = name
        text = section(values, "text_config")
        self.model_type = str(values.get("model_type", ""))
        self.family = self.model_type.removesuffix("_text")
        self.vision = section(values, "vision_config")
        renamed = {CHATGLM_KEYS.get(key, key): value for key, value in values.items()}
        defaults = GEMMA3_KEYS if self.family == "gemma3" else {}
        # The composite config's word on tying counts: its class ties the weights.
        tied = {"tie_word_embeddings": values["tie_word_embeddings"]} if "tie_word_embeddings" in values else {}
        self.values: dict[str, Any] = {**defaults, **renamed, **text, **tied}

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first key that is set. A key without a default must be there."""
        for key in keys:
            value = self.values.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return value
            if value is not None:
                place = f"{key} in config.json of {self.name or 'the model'}"
                raise UserError("must be a whole number", key=place, value=value, fix="download the model again")
        if default is None:
            reason = f"config.json of model_type '{self.model_type}' has no '{keys[0]}', so its size is unknown"
            raise UserError(reason, key=self.name or None, fix="give a decoder-only language model's config.json")
        return default

    def listed(self, key: str) -> tuple[Any, ...]:
        value = self.values.get(key)
        return tuple(value) if isinstance(value, list) else ()

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        return default if value is None else bool(value)


def from_config(values: Mapping[str, Any], name: str = "") -> ModelShape:
    """Returns the shape a Hugging Face config.json describes. A family that is not in FAMILIES is counted as a
    Llama."""
    config = ModelFile(values, name)
    family = FAMILIES.get(config.family, Family())
    number, flag = config.number, config.flag
    hidden, layers, heads = number("hidden_size"), number("num_hidden_layers"), number("num_attention_heads")
    experts = number("num_experts", "n_routed_experts", "num_local_experts", default=0)
    moe_width = number("moe_intermediate_size", "intermediate_size") if experts else 0
    bias = flag("attention_bias")
    return ModelShape(
        name=name,
        family=config.family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=hidden // max(heads, 1)),
        intermediate=number("intermediate_size"),
        vocab=number("vocab_size"),
        max_positions=number("max_position_embeddings", default=0),
        tied_embeddings=flag("tie_word_embeddings", family.tied),
        scalar_head=any(str(a).endswith("ForSequenceClassification") for a in config.listed("architectures")),
        norms_per_layer=family.norms,
        qkv_bias=family.qkv_bias or bias,
        output_bias=flag("attention_out_bias", family.output_bias and bias),
        qk_norm=family.qk_norm or flag("use_qk_norm"),
        attention_sinks=family.attention_sinks,
        experts=experts,
        experts_per_token=number("num_experts_per_tok") if experts else 0,
        moe_intermediate=moe_width,
        shared_expert_intermediate=number("shared_expert_intermediate_size", default=0)
        or number("n_shared_experts", default=0) * moe_width,
        shared_expert_gate=family.shared_expert_gate,
        expert_bias=family.expert_bias,
        dense_layers=dense_layers(config, layers) if experts else 0,
        q_lora_rank=number("q_lora_rank", default=0),
        kv_lora_rank=number("kv_lora_rank", default=0),
        qk_nope_head_dim=number("qk_nope_head_dim", default=0),
        qk_rope_head_dim=number("qk_rope_head_dim", default=0),
        v_head_dim=number("v_head_dim", default=0),
        **(vision_fields(config, hidden) if config.vision else {}),
    )


def dense_layers(config: ModelFile, layers: int) -> int:
    """Counts the layers of a mixture of experts that keep an ordinary MLP: the first k, listed ones, or all but each
    n-th."""
    first, every = config.number("first_k_dense_replace", default=0), config.number("decoder_sparse_step", default=1)
    listed = config.listed("mlp_only_layers")
    sparse = (i for i in range(layers) if i >= first and i not in listed and every and (i + 1) % every == 0)
    return layers - sum(1 for _ in sparse)


def vision_fields(config: ModelFile, hidden: int) -> dict[str, int]:
    number = ModelFile(config.vision).number
    width = number("embed_dim", "hidden_size")
    return {
        "vision_params": vision_parameters(config, hidden),
        "vision_depth": number("depth", "num_hidden_layers"),
        "vision_width": width,
        "vision_inner": number("intermediate_size", default=4 * width),
        "vision_patches_per_token": number("spatial_merge_size", default=2) ** 2,
    }


def vision_parameters(config: ModelFile, hidden: int) -> int:
    """Counts the parameters of the image tower and its projection into the language model, by family.

    blocks + patch embedding + positions + merger; a tower of another family is counted as a plain ViT."""
    tower = ModelFile(config.vision)
    number = tower.number
    width = number("embed_dim", "hidden_size")
    inner = number("intermediate_size", default=4 * width)
    depth = number("depth", "num_hidden_layers")
    patch = max(1, number("patch_size", default=14))
    pixels = 3 * patch**2
    frames = number("temporal_patch_size", default=2)
    merged = number("spatial_merge_size", default=2) ** 2 * width
    out = number("out_hidden_size", default=hidden)
    merger = merged * merged + merged + merged * out + out
    attention = 4 * width * width
    plain_block = attention + 2 * width * inner + inner + 9 * width
    if config.family == "qwen2_vl":
        return depth * plain_block + pixels * frames * width + merger + 2 * width
    if config.family == "qwen2_5_vl":
        block = attention + 3 * width * inner + 2 * inner + 7 * width
        return depth * block + pixels * frames * width + merger + width
    if config.family in ("qwen3_vl", "qwen3_vl_moe"):
        stacks = len(tower.listed("deepstack_visual_indexes"))
        positions = number("num_position_embeddings", default=2304) * width
        mergers = merger + 2 * width + stacks * (merger + 2 * merged)
        return depth * plain_block + pixels * frames * width + width + positions + mergers
    positions = (number("image_size", default=0) // patch) ** 2 * width
    if config.family == "glm4v":
        block = attention + 3 * width * out + 2 * width
        projector = merged * out + out + out * out + 2 * out + 3 * out * inner
        return depth * block + pixels * frames * width + width + positions + 2 * width + projector
    projector = width * hidden + width if config.family == "gemma3" else merger
    return depth * plain_block + pixels * width + width + positions + 2 * width + projector


@cache
def table() -> dict[str, Mapping[str, Any]]:
    """Hub id -> the facts of its config.json."""
    entries = json.loads(TABLE.read_text())
    return {name: entry["config"] for entry in entries for name in entry["names"]}


@cache
def short_names() -> dict[str, str]:
    """Lower-case last path component -> hub id, so that a folder named after a model is recognised."""
    return {name.rsplit("/", 1)[-1].lower(): name for name in table()}


def shape_of(path: str) -> ModelShape | None:
    """Returns the shape of the model at `path`: its own config.json, else the hub's cache on this disk, else the
    table."""
    if path.startswith(BUILTIN):
        expanded = ASSETS / path.removeprefix(BUILTIN)
    else:
        expanded = Path(os.path.expanduser(os.path.expandvars(path)))
    for file in (expanded / "config.json", cached_config(path)):
        if file is not None and os.path.isfile(file):
            return from_config(read_config(file), path)
    name = path if path in table() else short_names().get(expanded.name.lower())
    return None if name is None else from_config(table()[name], path)


@dataclass(frozen=True)
class LocalModel:
    """A language model on this disk."""

    path: str
    shape: ModelShape
    chats: bool
    """True if its tokenizer has a chat template."""


def local_models() -> list[LocalModel]:
    """Returns the language models that are complete on this disk: fetched by `paddock models get`, or in the hub's
    cache."""
    files = {str(file.parent): file for file in sorted(cache_folder("models").glob("*/config.json"))}
    folders = sorted(folder.name.removeprefix("models--") for folder in hub_cache().glob("models--*"))
    names = [folder.replace("--", "/") for folder in folders]
    files |= {name: file for name in names if (file := cached_config(name))}
    models = []
    for path, file in files.items():
        with suppress(UserError):  # nobody asked for this model
            values = read_config(file)
            speaks = str((values.get("architectures") or [""])[0]).endswith("ForCausalLM")
            if speaks and any(file.parent.glob("*.safetensors")):
                models.append(LocalModel(path, from_config(values, path), _chats(file.parent)))
    return models


def _chats(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and '"chat_template"' in config.read_text(errors="replace")


def read_config(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read as JSON: {error}", key=str(file), fix="download the model again") from error
    if not isinstance(values, dict):
        raise UserError("holds no JSON object", key=str(file), fix="download the model again")
    return values


def cached_config(path: str) -> Path | None:
    """models--org--name/snapshots/<commit>/config.json of the hub's cache: the commit of refs/main, else the newest."""
    folder = hub_cache() / ("models--" + path.replace("/", "--"))
    files = sorted(folder.glob("snapshots/*/config.json"), key=lambda file: file.lstat().st_mtime)
    main = folder / "refs" / "main"
    named = folder / "snapshots" / main.read_text().strip() / "config.json" if main.is_file() else None
    if named is not None and named.is_file():
        return named
    return files[-1] if files else None


def hub_cache() -> Path:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"
