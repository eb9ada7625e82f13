"""The section of checkpoints under verl's name."""

from verl._sections import section

CheckpointConfig = section("CheckpointConfig", "actor_rollout_ref.actor.checkpoint")
