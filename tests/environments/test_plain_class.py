"""Plain classes of TRL's contract run as environments."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from episodes import play, script

from paddock.environments.catalogue import environment_of
from paddock.environments.environment import Call, Ended
from paddock.environments.plain_class import PlainEnvironment
from paddock.errors import UserError

ENDED = Ended({}, [], [], True)


class Increment:
    """TRL's own example: count to a target."""

    closed = 0

    def reset(self, target: int = 3, **kwargs: Any) -> str | None:
        self.counter, self.target = 0, target
        return f" Count to {target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    def close(self) -> None:
        Increment.closed += 1

    def _helper(self) -> None: ...


def test_a_whole_episode_calls_tools_and_is_paid_by_get_reward():
    calls = [[Call("increment", {"step": "2"})], [Call("increment", {"step": 3})], "done"]
    closed = Increment.closed
    played = play(Increment, script(calls), row={"prompt": "Go.", "target": 5})
    assert (played.turns, played.reward) == (3, 1.0)
    assert played.messages[0] == {"role": "user", "content": "Go. Count to 5."}
    assert [one["content"] for one in played.messages if one["role"] == "tool"] == ["2", "5"]
    assert Increment.closed == closed + 2  # of the episode, and of the object that was asked for its tools


def test_public_methods_are_tools_and_reserved_or_private_ones_are_not():
    (tool,) = environment_of(Increment).tools
    assert tool.name == "increment"
    assert tool.parameters["properties"]["step"] == {"type": "integer", "description": "Value to add to the counter."}


def reset_to(said: Any) -> PlainEnvironment:
    class Says:
        def reset(self, **row: Any) -> Any:
            return said

    return PlainEnvironment(Says())


SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "Q"}


@pytest.mark.parametrize(
    ("prompt", "said", "expected"),
    [
        ([SYSTEM, USER], "!", [SYSTEM, {"role": "user", "content": "Q!"}]),
        ("Q", "!", "Q!"),
        (None, "Q", "Q"),
        ([USER], None, None),
        ([USER], [{"role": "user", "content": "more"}], [USER, {"role": "user", "content": "more"}]),
        (
            [USER],
            [{"type": "image", "image": "i"}],
            [{"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "image", "image": "i"}]}],
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": "i"}]}],
            "!",
            [{"role": "user", "content": [{"type": "image", "image": "i"}, {"type": "text", "text": "!"}]}],
        ),
    ],
)  # fmt: skip
def test_what_reset_returns_is_appended_to_the_last_message(prompt, said, expected):
    row = {"prompt": prompt} if prompt is not None else {}
    assert reset_to(said).reset(row, 0) == expected
    assert row.get("prompt") == prompt


def test_reset_is_given_what_it_names_with_the_truth_under_other_names_and_the_seed():
    class Takes:
        def reset(self, answer: str, seed: int, level: int = 1) -> str:
            return f"{answer} {seed} {level}"

    assert PlainEnvironment(Takes()).reset({"ground_truth": "42", "other": 1, "level": 3}, 9) == "42 9 3"


def test_a_column_that_reset_needs_and_rows_lack_is_named():
    class Needs:
        def reset(self, board: str) -> None: ...

    with pytest.raises(UserError, match="takes 'board', and the rows have no such column") as caught:
        PlainEnvironment(Needs()).reset({"prompt": "x"}, 0)
    assert caught.value.key == "environment" and "prompt" in str(caught.value.fix)


def test_an_attribute_reward_is_left_to_reward_functions_and_a_coroutine_is_awaited():
    class Attribute:
        reward = 0.25

        def reset(self, **row: Any) -> None: ...

    class Waits(Attribute):
        async def get_reward(self) -> float:
            return 0.75

    assert PlainEnvironment(Attribute()).reward(ENDED) == 0.0
    waits = PlainEnvironment(Waits()).reward
    said: Any = waits(ENDED)
    assert inspect.iscoroutinefunction(waits) and asyncio.run(said) == 0.75
    assert reset_to(None).reward(ENDED) == 0.0


def test_a_public_method_without_docstring_or_types_is_refused():
    class Silent:
        def reset(self, **row: Any) -> None: ...
        def move(self, where: str) -> str:
            return where

    class Untyped(Silent):
        def move(self, where):
            """Moves."""

    for kind, reason in ((Silent, "has no docstring"), (Untyped, "has no type")):
        with pytest.raises(UserError, match=reason):
            environment_of(kind)
