"""Settings of a training engine, read from each role's section of the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paddock.config.engine import FrozenConfig, FSDPConfig, OptimConfig
from paddock.config.roles import ActorRolloutRefConfig, CriticConfig, CriticModelConfig, ModelConfig, RefConfig
from paddock.config.schema import RewardModelModelConfig
from paddock.config.topology import trains_adapters
from paddock.core.balance import needed_micro_batches, token_budget_micro_batches
from paddock.core.batch import Batch
from paddock.core.device import DTYPES, compute_dtype
from paddock.engines.train.routers import RouterSettings
from paddock.models.packing import sequence_lengths
from paddock.models.sharing import parts_of_groups

_A, _REF, _RO = (f"actor_rollout_ref.{role}" for role in ("actor", "ref", "rollout"))


@dataclass(frozen=True)
class Budget:
    """Limits what goes through the model at a time."""

    tokens: int
    rows: int | None = None
    """A fixed number of rows instead of a token budget."""
    key: str = "ppo_max_token_len_per_gpu"
    """Key that sets the tokens."""

    def split(self, batch: Batch, by_group: bool = False) -> list[Tensor]:
        """Returns row indices of each micro-batch; `by_group`: rows of a prompt together, its tokens counted once."""
        if self.rows is not None:
            return list(torch.arange(len(batch)).split(self.rows))
        rows, tokens = self.units(batch, by_group)
        return [positions(rows, part) for part in token_budget_micro_batches(tokens, self.tokens, self.key) if part]

    def needed(self, batch: Batch, by_group: bool = False) -> int:
        """Returns how many micro-batches hold these rows."""
        if self.rows is not None:
            return -(-len(batch) // self.rows)
        return needed_micro_batches(self.units(batch, by_group)[1], self.tokens, self.key)

    def split_into(self, batch: Batch, count: int, by_group: bool = False) -> list[Tensor]:
        """Returns row indices of exactly so many micro-batches, at least `needed`: some may be empty."""
        if self.rows is not None:
            parts = torch.arange(len(batch)).split(self.rows) if len(batch) else ()
            return [*parts, *[torch.empty(0, dtype=torch.long)] * (count - len(parts))]
        rows, tokens = self.units(batch, by_group)
        return [positions(rows, part) for part in token_budget_micro_batches(tokens, self.tokens, self.key, count)]

    def units(self, batch: Batch, by_group: bool) -> tuple[list[list[int]], list[int]]:
        """Returns rows that stay together, and their tokens."""
        if by_group:
            return parts_of_groups(batch, self.tokens)
        return [[row] for row in range(len(batch))], sequence_lengths(batch)


def positions(rows: list[list[int]], units: list[int]) -> Tensor:
    return torch.tensor([row for unit in units for row in rows[unit]], dtype=torch.long)


@dataclass(frozen=True)
class Settings:
    budget: Budget = Budget(16384)
    """Limit of a micro-batch in training."""
    forward_budget: Budget = Budget(16384)
    """Limit of a micro-batch without gradient."""
    optim: OptimConfig | None = None
    """None: the weights are frozen."""
    compute: torch.dtype = torch.float32
    """Parameters wider than this become the optimizer's; the model computes in copies of this type."""
    wide: torch.dtype = torch.float32
    """Type in which weights are loaded, and kept by the optimizer."""
    total_steps: int | None = None
    """Steps of the run in which the role learns, for schedules that end with it."""
    temperature: float = 1.0
    topk: int = 0
    """Number of tokens of the columns `topk_tokens` and `topk_log_probs`."""
    packed: bool = True
    share_prompts: bool | None = None
    """Compute a group's prompt once. None: where that is possible."""
    checkpointing: bool = False
    offload_activations: bool = False
    """Keeps what backward needs in host memory."""
    deterministic: bool = False
    exact: bool = False
    """Log-probs do not depend on how a batch is split, nor differ from those of the rollout, by a bit."""
    routers: RouterSettings | None = None
    """None: routers choose freely, and are not watched."""
    offload_params: bool = False
    offload_optimizer: bool = False
    computes_merged: bool = False
    """Layers compute by W + s B A, one rounded matrix, instead of both adapters beside W."""
    saves_merged: bool = False
    """Checkpoints hold the merged model too, beside adapters."""


def actor_settings(
    group: ActorRolloutRefConfig, device: torch.device, total_steps: int | None = None, merged: bool = False
) -> Settings:
    """`merged`: it computes by merged weights (see `topology.computes_merged`)."""
    actor, rollout, model = group.actor, group.rollout, group.model
    rows = None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
    forward_rows = None if rollout.log_prob_use_dynamic_bsz else rollout.log_prob_micro_batch_size_per_gpu
    forward_key = f"{_RO}.log_prob_max_token_len_per_gpu"
    return Settings(
        budget=Budget(actor.ppo_max_token_len_per_gpu, rows, f"{_A}.ppo_max_token_len_per_gpu"),
        forward_budget=Budget(rollout.log_prob_max_token_len_per_gpu, forward_rows, forward_key),
        optim=actor.optim,
        total_steps=total_steps,
        temperature=rollout.temperature,
        exact=group.numerics == "exact",
        packed=model.use_remove_padding,
        share_prompts=actor.use_prefix_grouper,
        checkpointing=model.enable_gradient_checkpointing,
        offload_activations=model.enable_activation_offload,
        routers=router_settings(group),
        computes_merged=merged,
        saves_merged="hf_model" in actor.checkpoint.save_contents,
        **engine_settings(actor.fsdp_config, device, adapters=trains_adapters(group)),
    )


def router_settings(group: ActorRolloutRefConfig) -> RouterSettings:
    """Reads the routers' keys. The loss of transformers is off: it would be a mean over the batch of one forward."""
    overrides = group.model.override_config
    assert not overrides.get("output_router_logits")
    return RouterSettings(
        replay=group.actor.router_replay.mode != "disabled",
        balance=float(overrides.get("router_aux_loss_coef") or 0.0),
    )


def reference_budget(ref: RefConfig) -> Budget:
    rows = None if ref.log_prob_use_dynamic_bsz else ref.log_prob_micro_batch_size_per_gpu
    return Budget(ref.log_prob_max_token_len_per_gpu, rows, f"{_REF}.log_prob_max_token_len_per_gpu")


def reference_settings(group: ActorRolloutRefConfig, device: torch.device, topk: int = 0) -> Settings:
    """Returns the settings of the reference, or of a teacher, which gives `topk` tokens.

    A teacher has the temperature of the student's samples: student and teacher then agree where their logits do.
    """
    return Settings(
        forward_budget=reference_budget(group.ref),
        temperature=group.rollout.temperature,
        topk=topk,
        exact=group.numerics == "exact",
        packed=group.model.use_remove_padding,
        share_prompts=group.actor.use_prefix_grouper,
        **engine_settings(group.ref.fsdp_config, device),
    )


def critic_settings(
    critic: CriticConfig, share_prompts: bool | None, device: torch.device, total_steps: int | None = None
) -> Settings:
    model = critic.model
    rows = None if critic.use_dynamic_bsz else critic.ppo_micro_batch_size_per_gpu
    forward_rows = None if critic.use_dynamic_bsz else critic.forward_micro_batch_size_per_gpu
    forward_key = "critic.forward_max_token_len_per_gpu"
    return Settings(
        budget=Budget(critic.ppo_max_token_len_per_gpu, rows, "critic.ppo_max_token_len_per_gpu"),
        forward_budget=Budget(critic.forward_max_token_len_per_gpu, forward_rows, forward_key),
        optim=critic.optim,
        total_steps=total_steps,
        packed=model.use_remove_padding,
        share_prompts=share_prompts,
        checkpointing=model.enable_gradient_checkpointing,
        offload_activations=model.enable_activation_offload,
        saves_merged="hf_model" in critic.checkpoint.save_contents,
        **engine_settings(model.fsdp_config, device, adapters=model.lora_rank > 0),
    )


def engine_settings(engine: FrozenConfig, device: torch.device, adapters: bool = False) -> dict[str, Any]:
    """Reads one engine section. Adapters, which are small, have masters in float32 whatever type the weights have."""
    assert DTYPES[engine.dtype] != torch.float16, "its gradients need a loss scale"
    compute = compute_dtype(engine.dtype, device)
    found = {"compute": compute, "wide": compute, "deterministic": engine.full_determinism}
    found |= {"offload_params": engine.param_offload}
    if isinstance(engine, FSDPConfig):
        masters = torch.float32 if adapters else DTYPES[engine.model_dtype]
        found |= {"wide": torch.promote_types(compute, masters), "offload_optimizer": engine.optimizer_offload}
    return found


def model_source(model: ModelConfig | CriticModelConfig | RewardModelModelConfig, section: str) -> dict[str, Any]:
    """Returns where a role's model comes from, as arguments of the loaders."""
    return {
        "path": str(model.path),
        "trust_remote_code": model.trust_remote_code,
        "override_config": model.override_config,
        "key": f"{section}.path",
    }
