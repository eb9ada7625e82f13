"""LoRA: small matrices beside frozen ones, y = W x + s B A x.  arXiv:2106.09685.  The only file that imports peft.

Adapters are put into a transformers model in place: its class, its backbone and its head stay what they are, so that
whoever runs the model runs the adapters too. What is trained is kept apart by name: `lora_` is part of it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from paddock.config.paths import BUILTIN
from paddock.config.roles import CriticModelConfig, ModelConfig
from paddock.core.registry import suggest
from paddock.errors import UserError
from paddock.facts.distribution import install_command
from paddock.models.load import model_folder

log = logging.getLogger(__name__)

NAME = "default"
"""peft's, of the one adapter that a model has here."""
ALL_LINEAR = "all-linear"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MERGED = "huggingface"
"""Folder of a checkpoint with the merged model, where checkpoint.save_contents asks for one."""
PREFIX = "base_model.model."
"""Prefix of every name in an adapter's file: peft wraps a model twice."""
BASE = ".base_layer."
SUM = "paddock_merged"
"""Buffer of an adapted layer that holds W + s B A; see `Adapters.hold_merged`."""
OTHER_KINDS = ("use_dora", "lora_bias", "modules_to_save", "layer_replication", "target_parameters",
               "trainable_token_indices", "fan_in_fan_out", "alora_invocation_tokens")  # fmt: skip
"""Fields of an adapter's config that make it something else than products of two matrices beside linear layers."""


@dataclass(frozen=True)
class Lora:
    """The adapter that a role's config asks for."""

    rank: int = 0
    """0: that of the adapter to start from."""
    alpha: float = ModelConfig.lora_alpha
    targets: Any = ALL_LINEAR
    excluded: Any = None
    start: Path | None = None
    """Folder of an adapter."""
    base: str = ""
    """Path or name of the frozen model, for the adapter's own config."""
    seed: int = 0
    """Seed of the initial A; the initial B is zero."""
    section: str = "actor_rollout_ref.model"

    @classmethod
    def of(cls, model: ModelConfig | CriticModelConfig, section: str, seed: int) -> Lora | None:
        """Returns the LoRA settings of a role; None if all weights are trained."""
        start = getattr(model, "lora_adapter_path", None)
        if not model.lora_rank and not start:
            return None
        path = str(model.path)
        local = path.startswith(BUILTIN) or Path(path).expanduser().is_dir()
        return cls(
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            targets=model.target_modules,
            excluded=getattr(model, "exclude_modules", None),
            start=Path(start).expanduser() if start else None,
            base=str(model_folder(path, f"{section}.path").resolve()) if local else path,
            seed=seed,
            section=section,
        )

    def wrong(self, reason: str, key: str, value: Any, fix: str) -> UserError:
        return UserError(reason, key=f"{self.section}.{key}", value=value, fix=fix)


class Adapters:
    """The LoRA adapters of one model."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config: Any = model.peft_config[NAME]
        self.layers: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "base_layer")}
        """Adapted layers by the plain names of their linear layers."""

    @property
    def rank(self) -> int:
        """The largest: a pattern of an adapter that a run starts from may name others."""
        return max(layer.r[NAME] for layer in self.layers.values())

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switches the adapters off for the `with` block."""
        for layer in self.layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer._disable_adapters = False

    def hold_merged(self) -> None:
        """Gives every adapted layer W + s B A as a tensor of its own, by which it computes from now on; gradients go to
        A and B as if it computed with those. `renew` is to follow each change of A or B."""
        for layer in self.layers.values():
            layer.register_buffer(SUM, torch.empty_like(layer.base_layer.weight.data), persistent=False)
            vars(layer)["forward"] = partial(by_merged_weight, layer)
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Computes what `hold_merged` holds anew, if it was called."""
        for layer in self.layers.values():
            if (held := merged_weight(layer)) is not None:
                held.copy_(whole_weight(layer))

    @contextmanager
    def in_weights(self) -> Iterator[None]:
        """Adds the adapters to the weights themselves for the `with` block, in place, and switches them off; afterwards
        the weights are what they were, bit for bit. Meanwhile the memory holds each weight twice. Does nothing where
        layers compute by merged weights anyway."""
        if any(merged_weight(layer) is not None for layer in self.layers.values()):
            yield
            return
        kept: list[tuple[Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for layer in self.layers.values():
                    weight = layer.base_layer.weight.data
                    kept.append((weight, weight.clone()))
                    weight.copy_(whole_weight(layer))
            with self.off():
                yield
        finally:
            for weight, before in kept:
                weight.copy_(before)

    def merged(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """W + s B A under plain names, from the model's own tensors in their order, each pair after its matrix.

        A prefix of all names (a critic's) stays.
        """
        for name, tensor in tensors:
            plain = name.replace(BASE, ".")
            if BASE in name and name.endswith(".weight"):
                place, weight = plain, tensor
            elif f".lora_A.{NAME}." in name:
                narrow = tensor
            elif f".lora_B.{NAME}." in name:
                yield place, added(weight, narrow, tensor, self.layer_of(place).scaling[NAME])
            else:
                yield plain, tensor

    def layer_of(self, weight: str) -> Any:
        place = weight.removesuffix(".weight")
        return self.layers[place] if place in self.layers else self.layers[place.partition(".")[2]]

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Saves the adapter as peft reads it. `tensors`: the trained ones, by their names in the model or the
        critic."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(folder)
        found = {file_name(name): tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(found, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    def put_into(self, other: PreTrainedModel) -> None:
        """Adds the same adapters, without values, to an empty model of the same class."""
        inject(other, self.config, empty=True)


@dataclass(frozen=True, eq=False)
class AdapterPair:
    """The two matrices beside one linear layer, for who computes y = W x + s B A x without the module."""

    module: Any
    a: nn.Parameter
    b: nn.Parameter
    scale: float

    @classmethod
    def beside(cls, module: Any) -> AdapterPair:
        """Raises ValueError for a module that computes anything else; the text says what."""
        if type(module) is not library().tuners.lora.Linear:
            raise ValueError(f"a {type(module).__name__}")
        if module.active_adapters != [NAME] or module.merged:
            raise ValueError("more than one adapter, or one that is merged")
        a, b = module.lora_A[NAME], module.lora_B[NAME]
        plain = type(a) is type(b) is nn.Linear and a.bias is b.bias is None
        if module.lora_variant or not plain or module.fan_in_fan_out:
            raise ValueError("an adapter that is not plain LoRA")
        if getattr(module.lora_dropout[NAME], "p", 0.0):
            raise ValueError("an adapter with dropout")
        return cls(module, a.weight, b.weight, float(module.scaling[NAME]))

    @property
    def is_off(self) -> bool:
        """See `Adapters.off`, which asks it of all."""
        return bool(self.module.disable_adapters)


class MergedProduct(torch.autograd.Function):
    """``x (W + s B A)' + bias``, of which A and B get gradients: ``dA = s (dy B)' x``, ``dB = s dy' (x A')``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.scale = scale
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, a, b = ctx.saved_tensors
        dy = grads[0]
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
        by_a = ctx.scale * ((dy @ b.to(dy.dtype)).t() @ x)
        by_b = ctx.scale * (dy.t() @ (x @ a.to(x.dtype).t()))
        return dx, None, None, by_a.to(a.dtype), by_b.to(b.dtype), None


def by_merged_weight(layer: Any, x: Tensor) -> Tensor:
    """Computes an adapted layer by what `Adapters.hold_merged` gave it; without its adapter while that is off."""
    base = layer.base_layer
    if layer.disable_adapters:
        return base(x)
    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    return MergedProduct.apply(x, merged_weight(layer), base.bias, a, b, layer.scaling[NAME])


def merged_weight(layer: Any) -> Tensor | None:
    """Returns W + s B A of a layer that computes by it; None of any other."""
    return getattr(layer, SUM, None)


def whole_weight(layer: Any) -> Tensor:
    """Computes W + s B A of a layer."""
    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    return added(layer.base_layer.weight, a, b, layer.scaling[NAME])


def added(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A, rounded once."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def adapters_of(model: PreTrainedModel) -> Adapters | None:
    return Adapters(model) if hasattr(model, "peft_config") else None


def adapters_on(model: Any) -> bool:
    """True if a forward goes through adapters, as the model is now."""
    found = (module for module in model.modules() if hasattr(module, "base_layer"))
    return hasattr(model, "peft_config") and not any(module.disable_adapters for module in found)


def is_adapter(name: str) -> bool:
    """True if a parameter belongs to an adapter."""
    return ".lora_" in name


def file_name(name: str) -> str:
    return PREFIX + name.removeprefix("backbone.").replace(f".{NAME}.", ".")


def attach(model: PreTrainedModel, lora: Lora | None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Freezes the model and gives it fresh adapters, or those to start from, in this type."""
    if lora is None:
        return model
    config = read_config(lora.start, lora) if lora.start else fresh_config(model, lora)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        inject(model, config, lora)
    for name, param in model.named_parameters():
        if is_adapter(name):
            param.data = param.data.to(dtype)
    if lora.start is not None:
        take(model, lora.start, lora)
    return model


def inject(model: PreTrainedModel, config: Any, lora: Lora | None = None, empty: bool = False) -> None:
    peft = library()
    try:
        with plain_names(model):
            peft.inject_adapter_in_model(config, model, NAME, low_cpu_mem_usage=empty)
    except (ValueError, RuntimeError) as error:
        if lora is None:
            raise
        raise lora.wrong(
            f"peft refuses it: {str(error).splitlines()[0]}", "target_modules", lora.targets, "names of linear layers"
        ) from None


@contextmanager
def plain_names(model: PreTrainedModel) -> Iterator[None]:
    """Hides the model's type from peft, which may take a linear layer, `gate_proj`, for one of the experts; those lie
    stacked in one tensor and get no adapter here."""
    own = vars(model.config)
    before = {"model_type": own["model_type"]} if "model_type" in own else {}
    own["model_type"] = "plain"
    try:
        yield
    finally:
        del own["model_type"]
        own.update(before)


def library() -> Any:
    try:
        import peft
    except ImportError:
        raise UserError(
            "LoRA needs peft", key="actor_rollout_ref.model.lora_rank", fix=install_command("lora")
        ) from None
    return peft


def fresh_config(model: PreTrainedModel, lora: Lora) -> Any:
    causal = model.get_output_embeddings() is not None
    return library().LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        target_modules=chosen_layers(model, lora),
        lora_dropout=0.0,  # sampling has none, nor may training
        bias="none",
        task_type="CAUSAL_LM" if causal else "FEATURE_EXTRACTION",
        base_model_name_or_path=lora.base,
    )


def chosen_layers(model: PreTrainedModel, lora: Lora) -> list[str]:
    """Names of the linear layers that get an adapter: never the head, whose product with hidden states is not run as a
    module but in parts of the vocabulary; with all-linear, those of the language model alone."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    allowed = [name for name, module in linear.items() if module is not head]
    if lora.targets == ALL_LINEAR:
        inside = {id(module) for module in model.get_decoder().modules()}
        found = [name for name in allowed if id(linear[name]) in inside]
    else:
        found = matching(lora.targets, allowed, list(linear), lora)
    unwanted = set() if not lora.excluded else {n for n in found for word in words_of(lora.excluded) if fits(word, n)}
    if lora.excluded and not unwanted:
        log.warning("%s.exclude_modules=%s names no layer that would get an adapter", lora.section, lora.excluded)
    left = [name for name in found if name not in unwanted]
    if not left:
        raise lora.wrong("no layer is left to get an adapter", "exclude_modules", lora.excluded, "exclude fewer layers")
    kinds = {name.rpartition(".")[2] for name in left}
    alike = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in kinds]
    return sorted(kinds) if alike == left else left


def matching(targets: Any, allowed: list[str], linear: list[str], lora: Lora) -> list[str]:
    """Every word must name a layer: peft passes over those that do not, as long as one does."""
    for word in words_of(targets):
        if any(fits(word, name) for name in allowed):
            continue
        if any(fits(word, name) for name in linear):
            reason, fix = (
                "the head gets no adapter: its logits are computed a part of the vocabulary at a time",
                "leave it out",
            )
        else:
            kinds = sorted({name.rpartition(".")[2] for name in allowed})
            reason, fix = "the model has no linear layer of that name", suggest(word, [ALL_LINEAR, *kinds])
        raise lora.wrong(reason, "target_modules", word, fix)
    return [name for name in allowed if any(fits(word, name) for word in words_of(targets))]


def words_of(layers: Any) -> list[str]:
    return [layers] if isinstance(layers, str) else [str(word) for word in layers]


def fits(word: str, name: str) -> bool:
    """True if `word` names the layer as in peft: its name or its end, or a pattern for all of it."""
    if name == word or name.endswith(f".{word}"):
        return True
    try:
        return re.fullmatch(word, name) is not None
    except re.error:
        return False


def read_config(folder: Path, lora: Lora) -> Any:
    """Reads the config of an adapter to start from, which names its layers; keys of the run must agree with it."""
    key = "lora_adapter_path"
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        held = ", ".join(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else "no such folder"
        raise lora.wrong(f"is not a saved adapter: {held or 'nothing'}", key, str(folder),
                         f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")  # fmt: skip
    try:
        stored = json.loads((folder / CONFIG_FILE).read_text())
        kind, others = stored["peft_type"], [name for name in OTHER_KINDS if stored.get(name)]
    except (ValueError, TypeError, KeyError) as error:
        raise lora.wrong(
            f"{CONFIG_FILE} cannot be read: {error!r}", key, str(folder), "save it anew with peft"
        ) from None
    if kind != "LORA" or others or stored.get("bias", "none") != "none":
        what = kind if kind != "LORA" else ", ".join(others) or "trained biases"
        raise lora.wrong(f"is not plain LoRA: {what}", key, str(folder), "merge it into the model, and start from that")
    config = library().PeftConfig.from_pretrained(str(folder))
    if lora.rank and lora.rank != config.r:
        raise lora.wrong(
            f"{folder} has rank {config.r}", "lora_rank", lora.rank, f"lora_rank={config.r}, or leave it out"
        )
    if lora.alpha not in (ModelConfig.lora_alpha, config.lora_alpha):
        raise lora.wrong(f"{folder} has alpha {config.lora_alpha}", "lora_alpha", lora.alpha, "leave it out")
    for name, asked in (("target_modules", lora.targets), ("exclude_modules", lora.excluded)):
        if asked not in (None, ALL_LINEAR) and set(words_of(asked)) != set(words_of(stored.get(name) or [])):
            raise lora.wrong(f"{folder} says itself where it stands: {stored.get(name)}", name, asked, "leave it out")
    config.lora_dropout, config.inference_mode, config.base_model_name_or_path = 0.0, False, lora.base
    config.init_lora_weights = True
    return config


@torch.no_grad()
def take(model: PreTrainedModel, folder: Path, lora: Lora) -> None:
    """Loads the values of an adapter to start from."""
    for ends in (model.get_input_embeddings(), model.get_output_embeddings()):
        if hasattr(ends, "base_layer"):
            raise lora.wrong("changes the embedding or the head, which get no adapter here", "lora_adapter_path",
                             str(folder), "merge it into the model, and start from that")  # fmt: skip
    own = {name: param for name, param in model.named_parameters() if is_adapter(name)}
    stored, strange = read(folder, own)
    if strange:
        raise lora.wrong(f"is the adapter of another model: {', '.join(strange[:3])}", "lora_adapter_path", str(folder),
                         f"an adapter of {lora.base}")  # fmt: skip
    for name, param in own.items():
        param.copy_(stored[name])


def read(folder: Path, own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """An adapter's tensors by the names in `own`, and those that only one side has, or in another shape."""
    try:
        stored = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        return {}, [f"{WEIGHTS_FILE}: {error}"]
    names = {file_name(name): name for name in own}
    strange = sorted(stored.keys() ^ names.keys())
    strange += [
        f"{name} is {list(stored[name].shape)}, not {list(own[ours].shape)}"
        for name, ours in names.items()
        if name in stored and stored[name].shape != own[ours].shape
    ]
    return {names[name]: tensor for name, tensor in stored.items() if name in names}, strange


def with_adapter(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Weights of a model with those of a saved adapter added to them."""
    found = adapters_of(attach(model, Lora(start=folder, base=str(model.config.name_or_path))))
    assert found is not None
    return dict(found.merged(model.state_dict().items()))
