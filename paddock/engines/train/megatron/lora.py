"""LoRA beside Megatron's linear layers: y = W x + s B A x, with A and B in the shares that the layer's matrix is in.

A layer's adapter stands beside the whole of its fused matrix: one A for queries, keys and values together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn
from torch.nn.functional import linear

from paddock.config.roles import LoraConfig
from paddock.core.registry import suggest
from paddock.engines.train.megatron.layout import Layout
from paddock.engines.train.megatron.mapping import Mapping, mark
from paddock.errors import UserError

LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
LATENT = {"linear_q_up": "linear_qkv", "linear_kv_up": "linear_qkv"}
"""Layers of latent attention that take the place of these."""
INITS: dict[str, Callable[..., Tensor]] = {
    "xavier": nn.init.xavier_normal_,
    "kaiming": lambda tensor, generator: nn.init.kaiming_uniform_(tensor, math.sqrt(5), generator=generator),
    "normal": lambda tensor, generator: nn.init.normal_(tensor, std=0.02, generator=generator),
}


@dataclass
class MegatronAdapters:
    """Holds the adapters of one model."""

    layers: dict[str, Adapter]
    active: bool = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switches the adapters off for the block."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Returns this rank's share of W + s B A."""
        layer = self.layers.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if layer is None:
            return weight
        change = layer.scale * (layer.wide.float() @ layer.narrow.float())
        return (weight.float() + change).to(weight.dtype)


class Adapter:
    """Holds the two matrices beside one layer. They are the layer's parameters, so they move and are named with it."""

    def __init__(self, layer: Any, adapters: MegatronAdapters, config: LoraConfig, dtype: torch.dtype, expert: bool):
        self.columns, self.expert, self.adapters = isinstance(layer, ColumnParallelLinear), expert, adapters
        self.ranks, self.sequence = layer.tp_group, layer.sequence_parallel and not expert
        self.scale = config.alpha / config.rank
        out, width = layer.weight.shape
        self.narrow, self.wide = (
            nn.Parameter(torch.zeros(shape, dtype=dtype, device=layer.weight.device))
            for shape in ((config.rank, width), (out, config.rank))
        )
        mark(self.narrow, expert=expert, split=expert or not self.columns)
        mark(self.wide, expert=expert, split=expert or self.columns)
        whole = self.narrow if self.columns else self.wide
        whole.sequence_parallel = self.sequence  # type: ignore[attr-defined]
        layer.lora_A, layer.lora_B = self.narrow, self.wide
        layer.register_forward_hook(self.add)

    def start(self, name: str, config: LoraConfig, layout: Layout, rank: int) -> None:
        """Draws A by the layer's name alone: every layout starts from the same."""
        ways = 1 if self.columns or self.expert else layout.tensor
        generator = torch.Generator().manual_seed(crc32(name.encode()) ^ layout.seed)
        whole = torch.empty(len(self.narrow), self.narrow.shape[1] * ways)
        INITS[config.lora_A_init_method](whole, generator=generator)
        self.narrow.data.copy_(whole.chunk(ways, 1)[rank if ways > 1 else 0])

    def add(self, layer: nn.Module, given: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        if not self.adapters.active:
            return output
        between = linear(given[0], self.narrow)
        if self.expert:
            pass  # all of it is here
        elif self.columns and self.sequence:
            between = gather_from_sequence_parallel_region(between, group=self.ranks)
        elif self.columns:
            between = copy_to_tensor_model_parallel_region(between, group=self.ranks)
        elif self.sequence:
            between = reduce_scatter_to_sequence_parallel_region(between, group=self.ranks)
        else:
            between = reduce_from_tensor_model_parallel_region(between, group=self.ranks)
        return output[0] + self.scale * linear(between, self.wide), output[1]


def attach(mapping: Mapping, config: LoraConfig, section: str, layout: Layout, dtype: torch.dtype) -> MegatronAdapters:
    """Freezes all that the model has, and puts adapters beside the layers that are named."""
    refuse_unsupported(config, section)
    gpt, ranks = mapping.decoder.gpt, mapping.ranks
    gpt.requires_grad_(False)
    adapters = MegatronAdapters({})
    numbers = [layer.layer_number - 1 for layer in gpt.decoder.layers]
    for name, layer in list(gpt.named_modules()):
        leaf = LATENT.get(name.rpartition(".")[2], name.rpartition(".")[2])
        if leaf not in config.target_modules or leaf in config.exclude_modules:
            continue
        expert = ".local_experts." in name
        if expert and (layout.expert_tensor or layout.tensor) > 1:
            key = f"{layout.key}.expert_tensor_parallel_size"
            raise UserError("adapters stand beside whole experts", key=key, value=layout.expert_tensor, fix=f"{key}=1")
        found = Adapter(layer, adapters, config, dtype, expert)
        found.start(global_name(name, numbers, mapping), config, layout, ranks.tensor.rank())
        adapters.layers[name] = found
    return adapters


def global_name(name: str, numbers: list[int], mapping: Mapping) -> str:
    """Returns the layer's name with the numbers that layer and expert have in the whole model."""
    words = name.split(".")
    words[2] = str(numbers[int(words[2])])
    if "local_experts" in words:
        place = words.index("local_experts") + 1
        own = mapping.decoder.config.num_moe_experts // mapping.ranks.expert.size()
        words[place] = str(int(words[place]) + mapping.ranks.expert.rank() * own)
    return ".".join(words)


def refuse_unsupported(config: LoraConfig, section: str) -> None:
    for name in (*config.target_modules, *config.exclude_modules):
        if name not in LAYERS:
            key = f"{section}.target_modules" if name in config.target_modules else f"{section}.exclude_modules"
            raise UserError("no such layer of Megatron's", key=key, value=name, fix=suggest(name, list(LAYERS)))
    reasons = {
        "dropout": (not config.dropout, "sampling has none, nor may training", "0"),
        "adapter_path": (
            config.adapter_path is None,
            "adapters of peft stand beside queries, keys and values each, Megatron's beside the three at once",
            "merge it into the model first: paddock export",
        ),
        "dtype": (config.dtype is None, "adapters have the type of megatron.dtype, their masters float32", "leave it"),
    }
    for name, (harmless, why, fix) in reasons.items():
        if not harmless:
            raise UserError(why, key=f"{section}.{name}", value=getattr(config, name), fix=fix)
