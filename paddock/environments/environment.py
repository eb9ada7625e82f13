"""What an environment is: it asks, answers the policy's turns, and pays. One object lives for one episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from paddock.environments.tools import Tool, tools_of

Message = dict[str, Any]
Messages = str | list[Message]
"""A plain text, or messages with `role` and `content`."""


@dataclass(frozen=True)
class Call:
    """Holds one tool call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    """Identity that the policy gave it, in formats that have one."""


@dataclass(frozen=True)
class Malformed:
    """Holds a tool call that cannot be read, and why: the policy is told, and goes on."""

    text: str
    reason: str


@dataclass(frozen=True)
class Answer:
    """Holds one turn of the policy.

    >>> import paddock
    >>> paddock.Answer("the sum is 42").text
    'the sum is 42'
    """

    text: str
    """The turn, decoded, without special tokens."""
    tokens: Sequence[int] = ()
    calls: Sequence[Call] = ()
    """Tool calls in it, in the order in which they were written."""
    malformed: Sequence[Malformed] = ()
    """Tool calls in it that cannot be read."""
    results: Sequence[Message] = ()
    """Messages that answer `calls` and `malformed`: what the tools returned."""
    number: int = 0
    """0 for the first turn of the episode."""
    stopped: bool = True
    """False if the turn was cut at a limit: the episode ends with it."""


@dataclass(frozen=True)
class Turn:
    """Holds what the environment says to a turn of the policy.

    >>> import paddock
    >>> paddock.Turn("too low", reward=0.1).done
    False
    """

    messages: Messages = field(default_factory=list)
    """Messages to go on with; a text is one message of the user's."""
    reward: float = 0.0
    """Reward of the policy's turn, paid at its last token."""
    done: bool = False
    """True: the episode is over."""


@dataclass(frozen=True)
class Ended:
    """Holds a finished episode, as `Environment.reward` reads it.

    >>> import paddock
    >>> said = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]
    >>> paddock.Ended({"ground_truth": "5"}, said, [paddock.Answer("5")], done=True).text
    '5'
    """

    row: Mapping[str, Any]
    """The row of data: `prompt`, `ground_truth`, `data_source`, and each column of `extra_info`."""
    messages: Sequence[Message]
    """The whole conversation: the prompt, the policy's turns, and what stands between them."""
    answers: Sequence[Answer]
    """The policy's turns."""
    done: bool
    """True if the environment ended it, False if it was cut at a limit."""

    @property
    def text(self) -> str:
        """Returns the policy's last turn."""
        return self.answers[-1].text if self.answers else ""


class Environment:
    """Asks the policy something, answers its turns, and pays rewards: subclass it and change what you need.

    One object is made for each episode. As it stands it asks the row's own prompt, runs the tools that the policy
    calls, and ends with the first turn that calls none. Methods may be coroutines (`async def`); others run in threads,
    so that one that waits holds nobody up. A class may set `max_turns`, the most turns of the policy; `inline = True`,
    if every method returns at once and needs no thread; and `call_format`, how tool calls are written.

    >>> import paddock
    >>> class Guess(paddock.Environment):
    ...     def reset(self, row, seed):
    ...         self.secret = seed % 10
    ...         return "Guess a digit."
    ...
    ...     def step(self, answer):
    ...         return paddock.Turn(reward=1.0, done=True) if answer.text == str(self.secret) else "No. Again?"
    >>> game = Guess()
    >>> game.reset({}, seed=13)
    'Guess a digit.'
    >>> game.step(paddock.Answer("3")).reward
    1.0
    """

    max_turns: ClassVar[int | None] = None
    """Most turns of the policy in an episode; None: as many as the config allows."""
    inline: ClassVar[bool] = False
    """True: every method returns at once, so it is called between two decode steps and needs no thread."""
    calls_limited: ClassVar[bool] = True
    """True: a turn's calls and a result's length are limited as verl limits them, unless keys set other limits."""
    told: Mapping[str, Any] = MappingProxyType({})
    """What reward functions find in `extra_info` beside the row's columns, once the episode has ended."""
    call_format: ClassVar[str | None] = None
    """How tool calls are written; None: as `actor_rollout_ref.rollout.multi_turn.format` or the template says."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        """Returns the prompt of the episode; None: the row's own.

        The seed is the same for all episodes of a group, and another one in each step.

        >>> paddock.Environment().reset({"prompt": "2+3="}, seed=13) is None
        True
        """
        return None

    def step(self, answer: Answer) -> Turn | Messages | None:
        """Returns what comes after a turn of the policy: a `Turn`, messages to go on with, or None to end.

        As it stands, it goes on with what the tools returned, and ends if none was called.

        >>> told = [{"role": "tool", "name": "add", "content": "5"}]
        >>> paddock.Environment().step(paddock.Answer("[add(a=2, b=3)]", results=told)) == told
        True
        """
        return list(answer.results) or None

    def reward(self, episode: Ended) -> float:
        """Returns a reward for the whole episode, paid at the policy's last token beside those of its turns.

        >>> game.reward(paddock.Ended({}, [], [paddock.Answer("3")], done=True))
        0.0
        """
        return 0.0

    def close(self) -> None:
        """Frees what the episode held; called once, however it ended.

        >>> game.close()
        """

    def tools(self) -> Sequence[Tool]:
        """Returns the tools that the policy may call; as it stands, the methods marked with `tool`.

        >>> game.tools()
        []
        """
        return tools_of(self)


def overrides(environment: Environment, method: str) -> bool:
    """True if the environment has a method of its own: what the base class does needs no thread."""
    return getattr(type(environment), method) is not getattr(Environment, method)


def turn_of(said: Turn | Messages | None) -> Turn:
    """Returns what `Environment.step` said as a Turn."""
    if isinstance(said, Turn):
        return said
    return Turn(said) if said else Turn(done=True)


def messages_said(messages: Messages) -> list[Message]:
    """Returns messages as a list; a text is one of the user's."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def with_text(message: Message) -> Message:
    """Returns a message with a text in place of parts that are texts: some templates write no parts."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple) or not all(isinstance(one, dict) and is_text(one) for one in parts):
        return message
    return {**message, "content": "".join(part["text"] for part in parts)}


def is_text(part: Message) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def is_written(message: Message) -> bool:
    """True if templates write a message: it has a role, and a text or tool calls."""
    calls = message.get("content") is None and bool(message.get("tool_calls"))
    return isinstance(message.get("role"), str) and (calls or isinstance(message.get("content"), str))
