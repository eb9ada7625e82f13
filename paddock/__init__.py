"""Paddock trains language models with reinforcement learning: on a laptop in one process, on a cluster through Ray."""

__version__ = "0.1.0"
