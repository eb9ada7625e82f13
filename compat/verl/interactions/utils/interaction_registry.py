"""Interactions of a YAML file under verl's name."""

from __future__ import annotations

from typing import Any

from paddock.verl.tools import load_interactions


def initialize_interactions_from_config(interaction_config_file: str) -> dict[str, Any]:
    """Returns an object of each class that the file names, by the interaction's name."""
    return load_interactions(str(interaction_config_file))
