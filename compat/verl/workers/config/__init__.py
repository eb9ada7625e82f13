"""Sections of the config under verl's names; keys and defaults are Paddock's, with verl's own extra keys beside them.

Classes are for plug-ins that name or make them. Paddock checks the config of a run by rules of its own.
"""

from __future__ import annotations

from typing import Any

from verl._sections import section
from verl.base_config import BaseConfig
from verl.trainer.config.config import CheckpointConfig

_A, _M, _RO = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_SIZES = (
    "ppo_mini_batch_size",
    "ppo_micro_batch_size",
    "ppo_micro_batch_size_per_gpu",
    "ppo_infer_micro_batch_size_per_gpu",
)

OptimizerConfig: Any = section("OptimizerConfig", f"{_A}.optim", ("lr_scheduler_type",), warmup_style=None)
FSDPOptimizerConfig: Any = type("FSDPOptimizerConfig", (OptimizerConfig,), {})
McoreOptimizerConfig: Any = type("McoreOptimizerConfig", (OptimizerConfig,), {})
FSDPEngineConfig: Any = section("FSDPEngineConfig", f"{_A}.fsdp_config", ("ulysses_sequence_parallel_size",))
McoreEngineConfig: Any = section("McoreEngineConfig", f"{_A}.megatron", ("sequence_parallel",))
PolicyLossConfig: Any = section("PolicyLossConfig", f"{_A}.policy_loss")
RouterReplayConfig: Any = section("RouterReplayConfig", f"{_A}.router_replay")

ActorConfig: Any = section(
    "ActorConfig",
    _A,
    (*_SIZES, "policy_loss", "global_batch_info", "rollout_n"),
    policy_loss=PolicyLossConfig,
    optim=OptimizerConfig,
    checkpoint=CheckpointConfig,
    rollout_n=1,
    ppo_micro_batch_size=None,
    global_batch_info={},
)
FSDPActorConfig: Any = section(
    "FSDPActorConfig", f"{_A}", _SIZES, (ActorConfig,), optim=FSDPOptimizerConfig, policy_loss=PolicyLossConfig
)
McoreActorConfig: Any = section(
    "McoreActorConfig", f"{_A}", _SIZES, (ActorConfig,), optim=McoreOptimizerConfig, policy_loss=PolicyLossConfig
)
CriticConfig: Any = section(
    "CriticConfig",
    "critic",
    (*_SIZES, "forward_micro_batch_size", "forward_micro_batch_size_per_gpu"),
    optim=OptimizerConfig,
    checkpoint=CheckpointConfig,
    rollout_n=1,
    ppo_micro_batch_size=None,
    forward_micro_batch_size=None,
)
FSDPCriticConfig: Any = type("FSDPCriticConfig", (CriticConfig,), {})
McoreCriticConfig: Any = type("McoreCriticConfig", (CriticConfig,), {})
HFModelConfig: Any = section("HFModelConfig", _M, ("path", "tokenizer_path"))
RolloutConfig: Any = section("RolloutConfig", _RO, ("max_model_len", "load_format"))
SamplingConfig: Any = section("SamplingConfig", f"{_RO}.val_kwargs")
MultiTurnConfig: Any = section("MultiTurnConfig", f"{_RO}.multi_turn")
AgentLoopConfig: Any = section("AgentLoopConfig", f"{_RO}.agent")
RewardModelConfig: Any = section("RewardModelConfig", "reward_model")

__all__ = ["BaseConfig", *(name for name, value in list(globals().items()) if isinstance(value, type))]
