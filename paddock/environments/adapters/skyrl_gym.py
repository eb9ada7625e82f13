"""Environments of SkyRL Gym: `skyrl_gym:gsm8k`, `skyrl_gym:text2sql`.

One is made for each row: it is given the row as `extras`, with the ground truth where SkyRL's data sets have it
(`reward_spec`, `reward_model`). What SkyRL's config has under the environment's name, such as `db_path` of text2sql or
`search_url` of search, are the arguments here. `postprocessed_action` is not used: the policy's tokens stay as drawn.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

from paddock.environments.environment import Answer, Environment, Messages, Turn, messages_said
from paddock.environments.packages import imported, refused, require_known


class SkyRLGym(Environment):
    """Runs one episode of an environment of SkyRL Gym."""

    def __init__(self, name: str, config: Any):
        self.name, self.config = name, config
        self.game: Any = None

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages:
        gym = imported("skyrl_gym", "skyrl-gym", f"skyrl_gym:{self.name}")
        truth = {"ground_truth": row.get("ground_truth")}
        extras = {"reward_spec": truth, "reward_model": truth, "extra_info": dict(row), **row}
        try:
            self.game = gym.make(self.name, env_config=self.config, extras=extras)
        except AssertionError as error:  # a column that it asks for
            fix = f"add the column; the rows have {', '.join(sorted(row))}"
            raise refused(f"skyrl_gym:{self.name}", f"the rows do not suit it: {error}", fix) from error
        messages, _ = self.game.init(messages_said(row.get("prompt") or []))
        return list(messages)

    def step(self, answer: Answer) -> Turn:
        said = self.game.step(answer.text)
        return Turn(list(said["observations"]), float(said["reward"]), bool(said["done"]))

    def close(self) -> None:
        if self.game is not None:
            self.game.close()
            self.game = None


def source(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Returns a function that makes environments of this name; `kwargs` are its config."""
    full = f"skyrl_gym:{name}"
    imported("skyrl_gym.envs", "skyrl-gym", full)
    registration = imported("skyrl_gym.envs.registration", "skyrl-gym", full)
    require_known(full, name, registration.registry, "SkyRL Gym")
    entry = registration.registry[name].entry_point
    kind = config_class(entry if callable(entry) else registration.load_env_creator(entry))
    return lambda: SkyRLGym(name, kind(**kwargs))


def config_class(environment: Any) -> Callable[..., Any]:
    """Returns the dataclass of an environment's config, which its constructor names, or a mapping if it has none."""
    hint = typing.get_type_hints(environment.__init__).get("env_config")
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
    return typing.cast("Callable[..., Any]", kinds[0]) if kinds else dict
