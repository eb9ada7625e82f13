"""Plays whole episodes of environments with a scripted policy, as the trainer would with a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddock.environments.catalogue import Factory, environment_of
from paddock.environments.environment import Answer, Call, Ended, Message, messages_said, turn_of
from paddock.environments.tools import ToolError, written

Policy = Callable[[int, str], str | list[Call]]
"""Takes the number of the turn and the last message; returns a text or tool calls."""


@dataclass(frozen=True)
class Played:
    """Holds what an episode came to."""

    turns: int
    reward: float
    messages: list[Message]
    answers: list[Answer]

    @property
    def texts(self) -> list[str]:
        return [answer.text for answer in self.answers]


def play(
    name: Any,
    policy: Policy,
    *,
    row: Mapping[str, Any] | None = None,
    seed: int = 7,
    kwargs: Mapping[str, Any] | None = None,
    limit: int = 60,
) -> Played:
    """Plays one episode to its end, or to `limit` turns."""
    factory = name if isinstance(name, Factory) else environment_of(name, kwargs or {})
    environment, row = factory.make(), row or {}
    try:
        asked = environment.reset(row, seed)
        messages = messages_said(asked if asked is not None else row.get("prompt", ""))
        answers: list[Answer] = []
        total, done = 0.0, False
        while not done and len(answers) < limit:
            written_now = policy(len(answers), str(messages[-1]["content"]))
            answers.append(answered(environment, written_now, len(answers)))
            turn = turn_of(environment.step(answers[-1]))
            total, done = total + turn.reward, turn.done
            messages += [{"role": "assistant", "content": answers[-1].text}, *messages_said(turn.messages)]
        total += environment.reward(Ended(row, messages, answers, done))
        return Played(len(answers), total, messages, answers)
    finally:
        environment.close()


def answered(environment: Any, said: str | list[Call], number: int) -> Answer:
    """Returns a turn of the policy; its calls are run."""
    if isinstance(said, str):
        return Answer(said, number=number)
    tools = {tool.name: tool for tool in environment.tools()}
    results = []
    for call in said:
        try:
            result = written(tools[call.name].function(**tools[call.name].arguments(call.arguments)))
        except (ToolError, KeyError) as error:
            result = f"error: {error}"
        assert not inspect.isawaitable(result)
        results.append({"role": "tool", "content": result, "name": call.name})
    return Answer("", calls=said, results=results, number=number)


def script(texts: Sequence[str | list[Call]]) -> Policy:
    """Returns a policy that says these, again and again."""
    return lambda number, _: texts[number % len(texts)]


def halving(low: int, high: int, form: str) -> Policy:
    """Returns a policy that guesses a number by halves; `form` is how a guess is written, e.g. `[{}]`."""
    ends = [low, high]

    def guess(number: int, said: str) -> str:
        if number == 0:
            ends[:] = [low, high]
        middle = sum(ends) // 2
        if number and "higher" in said:
            ends[0] = middle + 1
        elif number:
            ends[1] = middle - 1
        return form.format(sum(ends) // 2)

    return guess
