"""The optimizer step: master weights, gradients summed in float32, clipping, the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paddock.config.engine import OptimConfig
from paddock.core.device import has_fused_optimizers
from paddock.engines.train.forwards import backbone_of
from paddock.engines.train.offload import Offload
from paddock.engines.train.settings import Settings
from paddock.errors import UserError

OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam, "SGD": torch.optim.SGD}


def lr_at(step: int, config: OptimConfig, total_steps: int | None = None) -> float:
    """Returns the rate of step 0, 1, 2, ... of the run: linear from `lr_warmup_init` to `lr`, then constant or falling.

    With p the share of the decay that has passed and m = `min_lr_ratio`: linear lr (1 - (1 - m) p), cosine
    lr (m + (1 - m) (1 + cos(2 pi num_cycles p)) / 2). After the decay, p stays 1.
    """
    warmup = warmup_steps(config, total_steps)
    if step < warmup:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    decay = decay_end(config, total_steps) - warmup
    progress = min((step - warmup) / max(decay, 1), 1.0)
    floor = config.min_lr_ratio
    if config.lr_scheduler_type == "linear":
        return config.lr * (1 - (1 - floor) * progress)
    return config.lr * (floor + (1 - floor) * (1 + math.cos(2 * math.pi * config.num_cycles * progress)) / 2)


def warmup_steps(config: OptimConfig, total_steps: int | None) -> int:
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    share = config.lr_warmup_steps_ratio
    return int(share * decay_end(config, total_steps)) if share > 0 else 0


def decay_end(config: OptimConfig, total_steps: int | None) -> int:
    """Returns the step of the run at which a decay ends; like Megatron's, it counts the warm-up."""
    return config.lr_decay_steps or schedule_length(config, total_steps)


def schedule_length(config: OptimConfig, total_steps: int | None) -> int:
    length = config.total_training_steps if config.total_training_steps > 0 else total_steps
    if length is None:
        raise UserError(
            "the schedule ends with the run, and the length of the run is not known",
            key="optim.total_training_steps",
            value=config.total_training_steps,
            fix="set it to the number of optimizer steps, or trainer.total_training_steps",
        )
    return length


def make_optimizer(config: OptimConfig, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Makes the optimizer. Weight decay acts on every parameter, norms and biases too."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if has_fused_optimizers(parameters[0].device):
        options["fused"] = True
    if config.optimizer != "SGD":
        options["betas"] = tuple(config.betas)
    try:
        return OPTIMIZERS[config.optimizer](parameters, **options | config.override_optimizer_config)
    except (TypeError, ValueError) as error:
        raise UserError(
            str(error),
            key="optim.override_optimizer_config",
            value=config.override_optimizer_config,
            fix=f"arguments of torch.optim.{config.optimizer}",
        ) from None


class Updater:
    """Turns gradients of a model into changes of its weights.

    Parameters named in `compute` get the type named there: the optimizer keeps the wide originals, its masters, and the
    model's parameters follow them. As soon as backward has a gradient, it is added to its master's, and freed.
    """

    offload: Offload | None = None
    """Moves masters and optimizer state to the host while they are idle; prefetched when a step begins."""

    def __init__(
        self, model: nn.Module, config: OptimConfig, compute: Mapping[str, torch.dtype], total_steps: int | None = None
    ):
        self.config = config
        self.total_steps = total_steps
        self.step_no = 0  # the place in the schedule of the learning rate
        self.names, self.params = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
        dtypes = [compute.get(name, param.dtype) for name, param in zip(self.names, self.params, strict=True)]
        self.masters = [narrow(param, dtype) for param, dtype in zip(self.params, dtypes, strict=True)]
        self.optimizer = make_optimizer(config, self.masters)

    @property
    def lr(self) -> float:
        return lr_at(self.step_no, self.config, self.total_steps)

    def clip(self) -> Tensor:
        """Scales gradients down to `clip_grad`; returns their norm before."""
        return whole(nn.utils.clip_grad_norm_(self.masters, self.config.clip_grad, foreach=True))

    def begin(self) -> None:
        """Prefetches the optimizer state while gradients are computed."""
        if self.offload:
            self.offload.prefetch()

    @torch.no_grad()
    def step(self) -> None:
        if self.offload:
            self.offload.prefetch()
            self.offload.wait()
            self.offload.written()
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        self.optimizer.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters into the model's parameters."""
        pairs = [(p, m) for p, m in zip(self.params, self.masters, strict=True) if m is not p]
        if pairs:
            params, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(params, masters)

    def zero(self) -> None:
        for tensor in (*self.masters, *self.params):
            tensor.grad = None

    def named_masters(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.masters, strict=True))

    def state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "step": self.step_no}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes the moments and the place in the schedule; weight decay, betas and so on stay those of the config."""
        own = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, keys in zip(self.optimizer.param_groups, own, strict=True):
            group.update(keys)
        self.step_no = state["step"]

    def number_device(self, master: Tensor) -> torch.device:
        """Returns where the optimizer wants the count of a weight's steps: a fused one reads it where the weight is."""
        (group,) = self.optimizer.param_groups
        there = group.get("fused") or group.get("capturable")
        return master.device if there else torch.device("cpu")

    def idle_tensors(self) -> Iterator[Tensor]:
        """Yields the optimizer state, and the masters that are not the model's own parameters."""
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        yield from self.own_masters()

    def own_masters(self) -> Iterator[Tensor]:
        return (master for param, master in zip(self.params, self.masters, strict=True) if master is not param)


def updater_of(model: nn.Module, settings: Settings, compute: Mapping[str, torch.dtype]) -> Updater | None:
    """Makes the updater of a model that is trained, and turns checkpointing on; freezes the model otherwise."""
    if settings.optim is None:
        model.requires_grad_(False)
        return None
    if settings.checkpointing:
        backbone_of(model).gradient_checkpointing_enable({"use_reentrant": False})
    return Updater(model, settings.optim, compute, settings.total_steps)


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor that is in shards over ranks; every rank must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def narrow(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Gives the parameter this type; returns its master, which holds the wide value, or itself if nothing changed."""
    if param.dtype == dtype:
        return param
    master = nn.Parameter(param.detach())
    param.data = param.detach().to(dtype)

    def hand_over(param: Tensor) -> None:
        assert param.grad is not None
        if master.grad is None:
            master.grad = param.grad.to(master.dtype)
        else:
            master.grad.add_(param.grad)
        param.grad = None

    param.register_post_accumulate_grad_hook(hand_over)
    return master
