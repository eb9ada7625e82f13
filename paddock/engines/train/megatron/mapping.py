"""Which tensor of Hugging Face's model is which of Megatron's, declared once for all families, and the way to and fro.

A rule names a parameter of Megatron's, the tensors that it is made of, how they lie in it, and the dimension that ranks
share. A layer's rules are those whose tensors it has, each tensor by the first rule that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from paddock.engines.train.megatron.decoder import Decoder
from paddock.errors import UserError


@dataclass(frozen=True)
class Shares:
    """Holds what a joined tensor depends on beside its parts."""

    ways: int
    """Ranks that share it."""
    groups: int
    """Key and value heads."""


class Same:
    def join(self, parts: list[Tensor], shares: Shares) -> Tensor:
        return parts[0]

    def split(self, whole: Tensor, shapes: list[torch.Size], shares: Shares) -> list[Tensor]:
        return [whole]


SAME = Same()


class QueryKeyValue:
    """Joins group by group: the queries of its heads, its key, its value."""

    def join(self, parts: list[Tensor], shares: Shares) -> Tensor:
        rest = parts[0].shape[1:]
        return torch.cat([part.view(shares.groups, -1, *rest) for part in parts], 1).flatten(0, 1)

    def split(self, whole: Tensor, shapes: list[torch.Size], shares: Shares) -> list[Tensor]:
        rest = whole.shape[1:]
        sizes = [shape[0] // shares.groups for shape in shapes]
        return [part.reshape(-1, *rest) for part in whole.view(shares.groups, -1, *rest).split(sizes, 1)]


class Gated:
    """Joins rank by rank: shares of the gate and of what is gated. A single tensor has the two halves end to end."""

    def join(self, parts: list[Tensor], shares: Shares) -> Tensor:
        both = torch.cat(parts).view(2, shares.ways, -1, parts[0].shape[-1])
        return both.transpose(0, 1).reshape(-1, parts[0].shape[-1])

    def split(self, whole: Tensor, shapes: list[torch.Size], shares: Shares) -> list[Tensor]:
        both = whole.view(shares.ways, 2, -1, whole.shape[-1]).transpose(0, 1).reshape(-1, whole.shape[-1])
        return list(both.chunk(len(shapes)))


@dataclass(frozen=True)
class WeightRule:
    ours: str
    theirs: tuple[str, ...]
    how: Same | QueryKeyValue | Gated = SAME
    dim: int | None = None
    """Which one the ranks share; None: each has all of it."""
    experts: bool = False
    """Theirs has all experts in one tensor, ours one parameter for each."""
    words: bool = False
    """A row for each token; rows of zeros make shares equal."""


def norm(ours: str, theirs: str) -> WeightRule:
    return WeightRule(f"{ours}.weight", (f"{theirs}.weight",))


def attention(kind: str) -> WeightRule:
    parts = tuple(f"self_attn.{name}_proj.{kind}" for name in "qkv")
    return WeightRule(f"self_attention.linear_qkv.{kind}", parts, QueryKeyValue(), 0)


def mlp(ours: str, theirs: str) -> tuple[WeightRule, WeightRule]:
    return (
        WeightRule(f"{ours}.linear_fc1.weight", (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"), Gated(), 0),
        WeightRule(f"{ours}.linear_fc2.weight", (f"{theirs}.down_proj.weight",), dim=1),
    )


LAYER = (
    norm("input_layernorm", "input_layernorm"),
    attention("weight"),
    attention("bias"),
    norm("self_attention.q_layernorm", "self_attn.q_norm"),
    norm("self_attention.k_layernorm", "self_attn.k_norm"),
    WeightRule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), dim=1),
    WeightRule("self_attention.linear_q_down.weight", ("self_attn.q_a_proj.weight",)),
    norm("self_attention.q_latent_norm", "self_attn.q_a_layernorm"),
    WeightRule("self_attention.linear_q_up.weight", ("self_attn.q_b_proj.weight",), dim=0),
    WeightRule("self_attention.linear_q_up.weight", ("self_attn.q_proj.weight",), dim=0),
    WeightRule("self_attention.linear_kv_down.weight", ("self_attn.kv_a_proj_with_mqa.weight",)),
    norm("self_attention.kv_latent_norm", "self_attn.kv_a_layernorm"),
    WeightRule("self_attention.linear_kv_up.weight", ("self_attn.kv_b_proj.weight",), dim=0),
    norm("pre_mlp_layernorm", "post_attention_layernorm"),
    *mlp("mlp", "mlp"),
    WeightRule("mlp.router.weight", ("mlp.gate.weight",)),
    WeightRule("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias",)),
    WeightRule(
        "mlp.experts.local_experts.{}.linear_fc1.weight", ("mlp.experts.gate_up_proj",), Gated(), 0, experts=True
    ),
    WeightRule("mlp.experts.local_experts.{}.linear_fc2.weight", ("mlp.experts.down_proj",), dim=1, experts=True),
    *mlp("mlp.shared_experts", "mlp.shared_expert"),
    *mlp("mlp.shared_experts", "mlp.shared_experts"),
    WeightRule("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",)),
)
EMBEDDING = WeightRule("embedding.word_embeddings.weight", ("embed_tokens.weight",), dim=0, words=True)
FINAL = WeightRule("decoder.final_layernorm.weight", ("norm.weight",))
OUTPUT = WeightRule("output_layer.weight", ("lm_head.weight",), dim=0, words=True)


@dataclass(frozen=True)
class MappedWeight:
    rule: WeightRule
    ours: str
    """Prefix of this stage's names, where the stage has it."""
    theirs: str
    """Prefix of theirs."""
    stage: int

    @property
    def names(self) -> list[str]:
        return [self.theirs + name for name in self.rule.theirs]


class Mapping:
    """Copies between the tensors of a Hugging Face model and this rank's parameters."""

    def __init__(self, theirs: PreTrainedModel, decoder: Decoder):
        self.decoder, self.ranks = decoder, decoder.ranks
        self.merged: Callable[[str, Tensor], Tensor] = lambda name, weight: weight
        """Returns what this rank computes with in place of a parameter."""
        self.groups = decoder.config.num_query_groups
        state = theirs.state_dict()
        self.shapes = {name: tensor.shape for name, tensor in state.items()}
        self.buffers = {name for name, _ in theirs.named_buffers()}
        self.tied = bool(theirs.config.get_text_config().tie_word_embeddings)
        self.entries = list(self.all_entries("" if theirs.base_model is theirs else f"{theirs.base_model_prefix}."))
        known = {name for entry in self.entries for name in entry.names}
        if self.tied:
            known.add(OUTPUT.theirs[0])
        if strange := sorted(self.shapes.keys() - known):
            raise UserError(
                f"{theirs.config.model_type} has tensors that Megatron's layers have not: {', '.join(strange[:3])}",
                key="actor_rollout_ref.actor.strategy",
                value="megatron",
                fix="actor_rollout_ref.actor.strategy=fsdp",
            )

    def all_entries(self, prefix: str) -> Iterator[MappedWeight]:
        """Yields the entries in the order of the model, the same on every rank."""
        last = self.ranks.stages - 1
        yield MappedWeight(EMBEDDING, "", prefix, 0)
        for stage, numbers in enumerate(self.layers_by_stage()):
            for place, number in enumerate(numbers):
                theirs, left = f"{prefix}layers.{number}.", set(self.shapes)
                for rule in LAYER:
                    names = {theirs + name for name in rule.theirs}
                    if names <= left:
                        left -= names
                        yield MappedWeight(rule, f"decoder.layers.{place}.", theirs, stage)
        yield MappedWeight(FINAL, "", prefix, last)
        if OUTPUT.theirs[0] in self.shapes and not self.tied:
            yield MappedWeight(OUTPUT, "", "", last)

    def layers_by_stage(self) -> list[list[int]]:
        own = [layer.layer_number - 1 for layer in self.decoder.gpt.decoder.layers]
        numbers: list[list[int]] = [own] * self.ranks.stages
        if self.ranks.stages > 1:
            dist.all_gather_object(numbers, own, group=self.ranks.pipeline)
        return numbers

    @cached_property
    def own(self) -> dict[str, Tensor]:
        return dict(self.decoder.gpt.named_parameters()) | dict(self.decoder.gpt.named_buffers())

    def sharing(self, rule: WeightRule) -> dist.ProcessGroup:
        return self.ranks.expert_tensor if rule.experts else self.ranks.tensor

    def shares(self, rule: WeightRule) -> Shares:
        return Shares(self.sharing(rule).size(), self.groups)

    @torch.no_grad()
    def take(self, state: dict[str, Tensor]) -> None:
        """Copies this rank's part of each tensor into its parameters."""
        for entry in self.entries:
            if entry.stage == self.ranks.stage:
                self.take_entry(entry, [state[name] for name in entry.names])
        if self.tied and self.ranks.last and not self.ranks.first and hasattr(self.decoder.gpt, "output_layer"):
            self.put(self.own["output_layer.weight"], EMBEDDING, [state[self.entries[0].names[0]]])

    def take_entry(self, entry: MappedWeight, parts: list[Tensor]) -> None:
        rule, place = entry.rule, entry.ours + entry.rule.ours
        if not rule.experts:
            self.put(self.own[place], rule, parts)
            return
        count = len(parts[0]) // self.ranks.expert.size()
        for number in range(count):
            expert = parts[0][self.ranks.expert.rank() * count + number]
            self.put(self.own[place.format(number)], rule, [expert])

    def put(self, target: Tensor, rule: WeightRule, parts: list[Tensor]) -> None:
        whole, group = rule.how.join(parts, self.shares(rule)), self.sharing(rule)
        mark(target, expert=rule.experts, split=rule.dim is not None)
        if rule.dim is None:
            target.copy_(whole)
            return
        missing = target.shape[rule.dim] * group.size() - whole.shape[rule.dim]
        if rule.words and missing:
            whole = pad(whole, (0, 0, 0, missing))
        target.copy_(whole.chunk(group.size(), rule.dim)[group.rank()])

    @torch.no_grad()
    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yields gathered tensors under Hugging Face names, one by one; every rank must read to the end."""
        late: list[tuple[str, Tensor]] = []
        for entry in self.entries:
            found = self.gather(entry) if entry.stage == self.ranks.stage else None
            for number, name in enumerate(entry.names):
                tensor = self.from_stage(entry.stage, None if found is None else found[number], name)
                if name in self.buffers:
                    late.append((name, tensor))
                else:
                    yield name, tensor
        yield from late

    def gather(self, entry: MappedWeight) -> list[Tensor]:
        rule, place = entry.rule, entry.ours + entry.rule.ours
        shapes, shares, group = [self.shapes[name] for name in entry.names], self.shares(rule), self.sharing(rule)
        if not rule.experts:
            whole = joined(self.value(place), rule.dim, group)
            parts = rule.how.split(whole, shapes, shares)
            return [part[: shape[0]].contiguous() for part, shape in zip(parts, shapes, strict=True)]
        count = shapes[0][0] // self.ranks.expert.size()
        own = [joined(self.value(place.format(number)), rule.dim, group) for number in range(count)]
        own = [rule.how.split(expert, shapes, shares)[0] for expert in own]
        return [joined(torch.stack(own), 0, self.ranks.expert)]

    def value(self, name: str) -> Tensor:
        return self.merged(name, self.own[name].detach())

    def from_stage(self, stage: int, tensor: Tensor | None, name: str) -> Tensor:
        ranks = self.ranks.pipeline
        if tensor is None:
            dtype = torch.float32 if name in self.buffers else self.decoder.config.params_dtype
            tensor = torch.empty(self.shapes[name], dtype=dtype, device=next(self.decoder.parameters()).device)
        if ranks.size() > 1:
            dist.broadcast(tensor, dist.get_global_rank(ranks, stage), group=ranks)
        return tensor


def mark(param: Tensor, expert: bool, split: bool) -> None:
    """Marks for the optimizer which other ranks have this parameter, or another share of it."""
    param.expert, param.split_over_ranks = expert, split  # type: ignore[attr-defined]


def joined(part: Tensor, dim: int | None, ranks: dist.ProcessGroup) -> Tensor:
    """Gathers the shares of all ranks, end to end."""
    if dim is None or ranks.size() == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ranks.size())]
    dist.all_gather(parts, part.contiguous(), group=ranks)
    return torch.cat(parts, dim)
