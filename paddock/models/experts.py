"""Which experts each token of a forward goes to: watched, recorded, and played again.

A `Routing` travels through a model's layers as an argument, as attention's object does, so it is there again when a
checkpointed layer runs a second time. It sees the one place where a router chooses: a top-k over as many scores as
there are experts. Recorded choices take the place of its answer, and all that a family makes of the scores of the
chosen, softmax or sigmoid, norm and scale, is computed as ever, with its gradient. There is no file a family: blocks of
experts are found by their parameters, `[experts, in, out]` beside a router's `[experts, in]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from paddock.errors import UserError

ARGUMENT = "experts"
"""Name of the argument by which a routing goes through the layers."""
BLOCK, ROUTING = "paddock_expert_block", "paddock_routing"
"""Attributes of a watched block: its `ExpertBlock`, and the routing of the forward that it is in."""
CHOICES = (torch.topk, Tensor.topk)


@dataclass(frozen=True)
class ExpertBlock:
    """One block of experts of a model."""

    index: int
    """Number of the block, in the order of the layers."""
    experts: int
    top_k: int
    router: str
    """Name of the child that scores."""
    name: str


@dataclass(frozen=True)
class Experts:
    """The blocks of experts of a model."""

    blocks: tuple[ExpertBlock, ...]

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def count(self) -> int:
        """Experts of a layer, the largest one."""
        return max(block.experts for block in self.blocks)

    @property
    def top_k(self) -> int:
        return self.blocks[0].top_k

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer type that holds the number of an expert."""
        return torch.uint8 if self.count <= 256 else torch.int16


def experts_of(model: nn.Module) -> Experts | None:
    """Returns the model's blocks of experts, which are watched from now on; None if it has none."""
    blocks = tuple(vars(module)[BLOCK] for module in model.modules() if BLOCK in vars(module))
    return Experts(blocks or watch(model)) if blocks or any(blocks_of(model)) else None


def recordable(experts: Experts | None) -> Experts:
    if experts is None:
        raise UserError(
            "the model has no experts whose choice could be recorded",
            key="actor_rollout_ref.rollout.enable_rollout_routing_replay",
            value=True,
            fix="actor_rollout_ref.rollout.enable_rollout_routing_replay=False",
        )
    return experts


def watch(model: nn.Module) -> tuple[ExpertBlock, ...]:
    assert isinstance(model, PreTrainedModel)
    blocks, config = [], model.config.get_text_config()
    names = {module: name for name, module in model.named_modules()}
    for index, (block, router, count) in enumerate(blocks_of(model)):
        top_k = getattr(getattr(block, router), "top_k", None) or config.num_experts_per_tok
        vars(block)[BLOCK] = ExpertBlock(index, count, int(top_k), router, names[block])
        vars(block)["forward"] = MethodType(chosen_forward, block)
        blocks.append(vars(block)[BLOCK])
    for layer in layers_of(model):
        layer.register_forward_pre_hook(hand_over, with_kwargs=True)
    return tuple(blocks)


def blocks_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """Modules that hold experts and, beside them, their router: its name, and how many experts it scores."""
    for block in model.modules():
        counts = {count for child in block.children() if (count := held(child)) > 1}
        for name, child in block.named_children():
            weight = getattr(child, "weight", None)
            if isinstance(child, nn.Embedding) or not isinstance(weight, Tensor):
                continue
            if weight.dim() == 2 and len(weight) in counts:
                yield block, name, len(weight)
                break


def held(module: nn.Module) -> int:
    """Counts the experts in a module: tensors that are stacked, or a list of networks."""
    stacked = [len(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() == 3]
    return stacked[0] if stacked else len(module) if isinstance(module, nn.ModuleList) else 0


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that hold a watched block: what is called with the arguments of the forward."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [layer for found in lists for layer in found if any(BLOCK in vars(part) for part in layer.modules())]


def hand_over(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Gives a layer's blocks the forward's routing, before every run: under checkpointing there is a second."""
    for module in layer.modules():
        if BLOCK in vars(module):
            vars(module)[ROUTING] = kwargs.get(ARGUMENT)


def chosen_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs the module's own forward and watches its choice. A bound method, so that a copy of the module runs the
    copy."""
    routing, block = vars(module).pop(ROUTING, None), vars(module)[BLOCK]
    if routing is None:
        return type(module).forward(module, *args, **kwargs)
    scored = getattr(module, block.router).register_forward_hook(lambda _, __, found: routing.scored(block, found))
    try:
        with WatchedRouter(routing, block) as watched:
            found = type(module).forward(module, *args, **kwargs)
    finally:
        scored.remove()
    if routing.required and not watched.chose:
        raise UserError(
            f"{block.name} does not choose its experts by a top-k of {block.experts} scores, so none can be recorded",
            key="actor_rollout_ref.actor.router_replay.mode",
            fix="actor_rollout_ref.actor.router_replay.mode=disabled",
        )
    return found


class WatchedRouter(TorchFunctionMode):
    """Intercepts every top-k inside of a block of experts."""

    def __init__(self, routing: Routing, block: ExpertBlock):
        super().__init__()
        self.routing, self.block, self.chose = routing, block, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in CHOICES or args[0].dim() != 2:
            return func(*args, **kwargs)
        scores = args[0]
        if scores.shape[-1] == self.block.experts:
            self.chose = True
            return self.routing.choose(self.block, scores, func(*args, **kwargs))
        covered = self.routing.groups(self.block, scores)
        return func(scores if covered is None else covered, *args[1:], **kwargs)


class Routing:
    """The choices of one forward over T tokens, flattened; results are by the number of the block. FSDP copies every
    dataclass among the arguments of a forward, so that results of a copy would be lost: this is none."""

    def __init__(
        self,
        experts: Experts,
        replay: Tensor | None = None,
        counts: Tensor | None = None,
        frequency: Tensor | None = None,
        required: bool = True,
    ):
        """`replay` ``[T, layers, k]``: the choices to make. `counts` bool ``[T]``: tokens that statistics are taken of;
        None: no statistics. `frequency` ``[experts]``: choices per token, for the loss that balances (see
        engines/train). `required`: a block that chooses in a way nobody sees is an error."""
        self.experts, self.replay, self.counts, self.frequency = experts, replay, counts, frequency
        self.required = required
        self.ids: dict[int, Tensor] = {}
        self.agreed: dict[int, Tensor] = {}
        self.entropy: dict[int, Tensor] = {}
        self.pressure: dict[int, Tensor] = {}

    def choose(self, block: ExpertBlock, scores: Tensor, own: Any) -> Any:
        """Scores and numbers of the chosen: the recorded ones, where there are any, else the router's own."""
        if self.replay is None:
            self.ids[block.index] = own[1].detach()
            return own
        ids = self.replay[:, block.index].long()
        self.ids[block.index] = ids
        if self.counts is not None:
            same = (own[1].unsqueeze(-1) == ids.unsqueeze(-2)).any(-1).float().mean(-1)
            self.agreed[block.index] = (same * self.counts).sum()
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def groups(self, block: ExpertBlock, scores: Tensor) -> Tensor | None:
        """Raises the scores of the groups of recorded experts, if a router picks groups first: they come before all
        others.

        So what the router would have chosen, for `agreed`, is chosen among these groups too.
        """
        if self.replay is None or block.experts % scores.shape[-1]:
            return None
        of_expert = self.replay[:, block.index].long() // (block.experts // scores.shape[-1])
        return scores.scatter(-1, of_expert, torch.inf)

    def scored(self, block: ExpertBlock, found: Any) -> None:
        """Records statistics of a router's scores. Done again when a layer runs again: autograd counts what it
        keeps."""
        parts = found if isinstance(found, tuple) else (found,)
        logits = next(part for part in parts if part.shape[-1] == block.experts and part.is_floating_point())
        if self.counts is None:
            return
        log_probs = logits.reshape(-1, block.experts).float().log_softmax(-1)
        probs = log_probs.exp()
        with torch.no_grad():
            self.entropy.setdefault(block.index, -((probs * log_probs).sum(-1) * self.counts).sum())
        if self.frequency is not None:
            pressed = ((probs @ self.frequency.to(probs.dtype)) * self.counts).sum()
            self.pressure.setdefault(block.index, pressed)

    def chosen(self) -> Tensor:
        """``[T, layers, k]`` in the type that they are kept in."""
        found = [self.ids[index] for index in range(self.experts.layers)]
        return torch.stack(found, 1).to(self.experts.dtype)

    def load(self) -> Tensor:
        """``[layers, experts]``: how often each was chosen by a token that counts."""
        assert self.counts is not None
        weight = self.counts.double()
        loads = []
        for index in range(self.experts.layers):
            ids = self.ids.get(index, torch.empty(len(weight), 0, dtype=torch.long, device=weight.device))
            spread = weight.unsqueeze(-1).expand(ids.shape).reshape(-1)
            loads.append(weight.new_zeros(self.experts.count).index_add_(0, ids.reshape(-1), spread))
        return torch.stack(loads)
