"""Tasks of Reasoning Gym: `reasoning_gym:leg_counting`. One turn, scored by the task's own `score_answer`.

The episode's seed decides the task. A row with a column `seed` names a fixed one: that seed's, or the one at its column
`index`. The name `reasoning_gym` alone takes the name of the task from the row's column `dataset`. What stands in the
last <answer> tags is scored, and without such tags the whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from paddock.environments.environment import Answer, Environment, Messages, Turn
from paddock.environments.packages import imported, require_known
from paddock.environments.reused import asked

SEEDS = 2**31  # some tasks take no larger ones


class ReasoningGym(Environment):
    """Asks one question of a procedural data set."""

    max_turns = 1

    def __init__(self, name: str, create: Callable[[str, int, int], Any]):
        self.name, self.create = name, create

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages:
        fixed = row.get("seed") is not None
        number = int(row["seed"]) if fixed else seed % SEEDS
        index = int(row.get("index") or 0) if fixed else 0
        self.data = self.create(known(self.name or str(row.get("dataset", ""))), number, index + 1)
        self.entry = self.data[index]
        return asked(row, self.entry["question"])

    def step(self, answer: Answer) -> Turn:
        extract = imported("reasoning_gym.utils", "reasoning-gym", self.name).extract_answer
        said = extract(answer.text)
        score = self.data.score_answer(answer=answer.text.strip() if said is None else said, entry=self.entry)
        return Turn(reward=float(score), done=True)


def source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that makes tasks of this name; `kwargs` are the data set's config."""
    gym = imported("reasoning_gym", "reasoning-gym", f"reasoning_gym:{name}")

    @lru_cache(maxsize=64)  # the episodes of a group ask the same question
    def create(task: str, seed: int, size: int) -> Any:
        return gym.create_dataset(task, seed=seed, size=size, **kwargs)

    if name:
        create(known(name), 0, 1)  # arguments that do not suit are told now
    return lambda: ReasoningGym(name, create)


def known(name: str) -> str:
    """Returns the name of a task; one that does not exist is refused."""
    full = f"reasoning_gym:{name}"
    require_known(full, name, imported("reasoning_gym.factory", "reasoning-gym", full).DATASETS, "Reasoning Gym")
    return name
