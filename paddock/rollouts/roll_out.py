"""The one way from rows to episodes: in environments, or as one turn each."""

from __future__ import annotations

from collections.abc import Sequence

from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Completion, Prompt, RolloutEngine, Sampling
from paddock.rollouts.conversations import OnEpisodes
from paddock.rollouts.environments import Environments
from paddock.rollouts.episode import Episode, one_turn


def roll_out(
    engine: RolloutEngine, version: int, rows: Sequence[PromptRow], samples: int, sampling: Sampling,
    on_done: OnEpisodes | None = None, environments: Environments | None = None,
) -> list[Episode]:  # fmt: skip
    """Returns `samples` episodes for each row, row after row; their ids are those of `prompt_batch`.

    Rows are answered in `environments` if there are any, else each episode is one turn of the policy. `on_done` hears
    of episodes that end while others do not.
    """
    if environments:
        return environments.run(engine, version, rows, samples, sampling, on_done)
    prompts = [Prompt(row.tokens, list(ids_of(row, samples)), row.images) for row in rows]
    asked = {number: (row, prompt) for row, prompt in zip(rows, prompts, strict=True) for number in prompt.rows}

    def episodes(completions: Sequence[Completion]) -> list[Episode]:
        return [one_turn(one, *asked[one.row], version) for one in completions]

    def ended(completions: list[Completion]) -> None:
        assert on_done is not None
        on_done(episodes(completions))

    return episodes(engine.generate(prompts, sampling, on_done and ended)) if prompts else []


def ids_of(row: PromptRow, samples: int) -> range:
    """Returns the ids of the responses to a row."""
    return range(row.group * samples, (row.group + 1) * samples)
