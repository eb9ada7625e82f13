"""Paddock trains language models with reinforcement learning: on a laptop in one process, on a cluster through Ray."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddock.algorithms.advantages import estimator as estimator
    from paddock.algorithms.losses import policy_loss as policy_loss
    from paddock.core.batch import Batch as Batch
    from paddock.environments.environment import Answer as Answer
    from paddock.environments.environment import Ended as Ended
    from paddock.environments.environment import Environment as Environment
    from paddock.environments.environment import Turn as Turn
    from paddock.environments.tools import ToolError as ToolError
    from paddock.environments.tools import tool as tool
    from paddock.errors import UserError as UserError
    from paddock.library.plugins import logger as logger
    from paddock.library.plugins import scorer as scorer
    from paddock.library.run import Run as Run
    from paddock.rollouts.episode import Episode as Episode
    from paddock.rollouts.episode import Span as Span
    from paddock.runs.checkpoint import Checkpoint as Checkpoint
    from paddock.runs.samples import Sample as Sample
    from paddock.trainer.lifecycle import Outcome as Outcome
    from paddock.trainer.lifecycle import Step as Step

__version__ = "0.1.0"

if os.environ.get("PADDOCK_VERL") and "verl" not in sys.modules:  # a process of a script under `paddock run`
    import_module("paddock.facts.compat").serve()

EXPORTS = {
    "Run": "library.run",
    "UserError": "errors",
    "Step": "trainer.lifecycle",
    "Outcome": "trainer.lifecycle",
    "Checkpoint": "runs.checkpoint",
    "Sample": "runs.samples",
    "Batch": "core.batch",
    "Episode": "rollouts.episode",
    "Span": "rollouts.episode",
    "Environment": "environments.environment",
    "Answer": "environments.environment",
    "Turn": "environments.environment",
    "Ended": "environments.environment",
    "tool": "environments.tools",
    "ToolError": "environments.tools",
    "estimator": "algorithms.advantages",
    "policy_loss": "algorithms.losses",
    "scorer": "library.plugins",
    "logger": "library.plugins",
}
"""Names of the library, each imported when it is asked for: `import paddock` takes no time."""


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module 'paddock' has no attribute {name!r}")
    return getattr(import_module(f"paddock.{EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *EXPORTS])
