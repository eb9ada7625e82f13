"""Updates of tiny models for engines that share the work: settings, a critic, rows with all columns, and the losses."""

from __future__ import annotations

from typing import Any

import torch
from devices import DEVICE
from tiny_models import tiny_batch
from torch import Tensor
from transformers import PreTrainedModel

from paddock.algorithms.losses import LossInputs, policy_loss_terms, value_loss
from paddock.config.engine import FSDPConfig, MegatronConfig, OptimConfig
from paddock.config.roles import ActorConfig, CriticConfig
from paddock.core.batch import Batch
from paddock.core.masked import Denominators
from paddock.engines.train.base import LossFn, Outputs, Placement
from paddock.engines.train.settings import Budget, Settings
from paddock.models.value_head import ValueModel

WANT = {"actor": frozenset({"log_probs", "entropy"}), "critic": frozenset({"values"})}


def settings(**changes: Any) -> Settings:
    # AdamW divides by the gradient's own size: without a floor it makes much of the last bit of a tiny one
    optim = OptimConfig(lr=0.01, override_optimizer_config={"eps": 1e-3})
    defaults: dict[str, Any] = {"optim": optim, "budget": Budget(24), "forward_budget": Budget(40)}
    return Settings(**defaults | changes)


def over_ranks(sequence: int = 1, **keys: Any) -> Placement:
    """The actor's weights over all ranks, of which so many share each sequence; `keys` are those of FSDP."""
    return Placement(DEVICE, "actor_rollout_ref.actor", sequence, FSDPConfig(**keys), MegatronConfig(), None)


def in_role(model: PreTrainedModel, role: str) -> PreTrainedModel | ValueModel:
    """The model as an actor or, with a value head that is not zero, as a critic."""
    model.set_attn_implementation("paddock")
    if role == "actor":
        return model.to(DEVICE)
    critic = ValueModel(model.base_model)
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.value_head.weight)
    return critic.to(DEVICE)


def rollouts(rows: int = 7, seed: int = 0) -> Batch:
    batch = tiny_batch(rows, tools=True, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def draw() -> Tensor:
        return torch.randn(batch.need("mask").shape, generator=generator) * batch.need("mask")

    return batch.with_(old_log_probs=draw() - 5, advantages=draw(), values=draw(), returns=draw())


def loss_of(role: str, whole: Batch) -> LossFn:
    denominators = Denominators.count(whole.need("mask"))

    def policy(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = LossInputs(outputs.log_probs, micro.old_log_probs, micro.advantages, micro.mask)
        return policy_loss_terms(inputs, ActorConfig(entropy_coeff=0.1), denominators, outputs.entropy)

    def value(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        columns = outputs.values, micro.values, micro.returns, micro.mask
        return value_loss(*columns, CriticConfig(loss_agg_mode="token-mean"), denominators)

    return policy if role == "actor" else value
