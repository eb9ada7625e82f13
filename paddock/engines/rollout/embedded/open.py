"""Opens the embedded engine as the config asks for it: over the trainer's own model, or with weights of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.engines.rollout.base import EngineConfig
from paddock.engines.rollout.embedded.apart import EmbeddedCopy
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.rollout.stops import StopTables
from paddock.engines.train.open import rollout_policy

if TYPE_CHECKING:
    from paddock.engines.train.engine import Engine


def open_engine(config: EngineConfig, trainer: Engine | None) -> EmbeddedEngine:
    """Makes the engine over the trainer's own model, or over a copy that takes its weights from there."""
    rollout = config.actor_rollout_ref.rollout
    assert rollout.max_num_seqs is not None
    arguments: dict[str, Any] = {
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "max_model_len": rollout.max_model_len,
        "enforce_eager": rollout.enforce_eager,
        "free_cache": rollout.free_cache_engine and trainer is not None,
        "record_experts": rollout.enable_rollout_routing_replay,
        "stop_tables": StopTables.of_keys(config.actor_rollout_ref, config.data),
    }
    if trainer is not None:
        return EmbeddedEngine(trainer.rollout_model, merge=config.actor_rollout_ref.model.lora.merge, **arguments)
    return EmbeddedCopy(rollout_policy(config.actor_rollout_ref, config.trainer), **arguments)
