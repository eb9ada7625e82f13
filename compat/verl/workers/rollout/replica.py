"""A turn of the policy under verl's name."""

from paddock.verl.agent_loop import TokenOutput

__all__ = ["TokenOutput"]
