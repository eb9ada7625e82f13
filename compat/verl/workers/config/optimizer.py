"""Sections of the config under verl's names, by the module that verl has them in."""

from verl.workers.config import *  # noqa: F403
