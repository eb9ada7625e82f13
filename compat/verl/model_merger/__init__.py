"""Checkpoints as folders that transformers loads, under verl's name: `python -m verl.model_merger merge ...`."""
