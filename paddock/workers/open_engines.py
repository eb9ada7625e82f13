"""Makes the rollout engine that the config names, by its entry in the catalogue (`config/rollout_engines.py`)."""

from __future__ import annotations

import importlib

from paddock.config.rollout_engines import engine_kind
from paddock.config.schema import Config
from paddock.engines.rollout.base import CopyEngine, RolloutEngine
from paddock.engines.train.base import TrainEngine


def rollout_engine(config: Config, trainer: TrainEngine | None) -> RolloutEngine:
    """`trainer` has the weights that it samples with; None: they are on other devices."""
    module = importlib.import_module(engine_kind(config.actor_rollout_ref.rollout.name).module)
    return module.open_engine(config, trainer)


def copy_engine(config: Config) -> CopyEngine:
    """Makes an engine that is sent its weights from other processes."""
    engine = rollout_engine(config, None)
    assert isinstance(engine, CopyEngine)
    return engine
