"""A reward manager under verl's name, by the module that verl has it in."""

from verl.workers.reward_manager import DAPORewardManager

__all__ = ["DAPORewardManager"]
