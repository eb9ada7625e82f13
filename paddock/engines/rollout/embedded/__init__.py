"""The rollout engine that runs the actor's own modules."""

from paddock.engines.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
