"""An experiment is a YAML file: model, data set, seeds, number of steps and the keys of `paddock train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).with_name("experiments")
MERGED = ("settings", "evaluation")
"""Sections in which an experiment adds to the one that it is `like`; every other entry replaces that one's."""
SHARED = ("data.max_", "actor_rollout_ref.rollout.multi_turn.", "reward_model.sandbox.")
"""Beginnings of the keys of training that evaluation has too."""


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    about: str
    model: str
    """Name on the hub; `--model` names a local folder of the same weights."""
    data: str
    """Name of the data set, a folder with train.parquet and test.parquet: `paddock data NAME` writes it, and for
    `programs` the two commands that benchmarks/results/programs names."""
    seeds: tuple[int, ...]
    steps: int
    settings: dict[str, Any]
    """Keys of `paddock train`."""
    evaluation: dict[str, Any]
    """Keys of `paddock eval`, which samples several answers to each held-out prompt."""
    warm_up: str = ""
    """Command of supervised training, if the run starts from the model that it leaves: `--model` names that folder."""

    @property
    def start(self) -> str:
        """Returns a name of the model before training: experiments that start from the same model share it."""
        return self.name if self.warm_up else f"{self.model.rpartition('/')[2].lower()}-{self.data}"

    def training(self) -> list[str]:
        return words(self.settings)

    def sampling(self) -> list[str]:
        """Evaluation reads prompts and answers of the same lengths as training does, with the same tools and limits."""
        shared = {key: value for key, value in self.settings.items() if key.startswith(SHARED)}
        return words({**shared, **self.evaluation})


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Experiment:
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise SystemExit(f"no experiment is named {name}: there are {', '.join(names())}")
    found = read(path)
    return Experiment(name=name, **{**found, "seeds": tuple(found["seeds"])})


def read(path: Path) -> dict[str, Any]:
    """The entries of a file over those of the one that it is `like`. A key that is null there is left out."""
    own = yaml.safe_load(path.read_text())
    base = read(path.with_name(f"{own.pop('like')}.yaml")) if "like" in own else {}
    merged = {name: {**base.get(name, {}), **own.get(name, {})} for name in MERGED}
    for name, section in merged.items():
        merged[name] = {key: value for key, value in section.items() if value is not None}
    return {**base, **own, **merged}


def words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={text(value)}" for key, value in settings.items()]


def text(value: Any) -> str:
    return f"[{','.join(map(text, value))}]" if isinstance(value, list) else str(value)
