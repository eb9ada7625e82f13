"""Environments whose own program drives the conversation, and asks the policy where it asks its model.

The program runs as a coroutine in an event loop beside. Its model is `Driven.answer`: what the program asks becomes the
prompt or what stands between two turns, and the policy's turn is what the model returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from paddock.core.background import awaited, loop_beside
from paddock.environments.environment import Answer, Ended, Environment, Message, Turn
from paddock.environments.packages import refused
from paddock.errors import UserError


class Driven(Environment):
    """Holds the conversation of one program with the policy."""

    def __init__(self, name: str):
        self.name = name
        self.program: asyncio.Task[Any] | None = None
        self.asked: asyncio.Queue[list[Message] | UserError] = asyncio.Queue()
        self.answered: asyncio.Queue[Answer | None] = asyncio.Queue()
        self.heard: list[Message] = []
        self.turns = self.steps = 0
        """Answers that the program has been given, and those that `step` has seen: some calls cannot be read."""
        self.cut = False

    async def answer(self, prompt: list[Message]) -> Answer | None:
        """Returns the policy's turn behind `prompt`; None if it may write no more. The program calls this."""
        if self.cut:
            return None
        self.asked.put_nowait(prompt)
        return await self.answered.get()

    def refuse(self, reason: str, fix: str) -> None:
        """Ends the episode with an error, since what the program asks cannot be trained on. The program calls this."""
        self.cut = True
        self.asked.put_nowait(refused(self.name, reason, fix))

    def begin(self, program: Coroutine[Any, Any, Any]) -> list[Message]:
        """Starts the program, and returns what it asks first."""
        said = awaited(self._start(program))
        if said is None:
            raise refused(self.name, "the rollout ended before the policy's first turn", "look into its log")
        return said

    def step(self, answer: Answer) -> Turn:
        self.steps += 1
        if answer.malformed and not answer.calls:
            return Turn(list(answer.results))  # told, and goes on: the program would see a turn without calls
        said = awaited(self._go_on(answer))
        malformed = list(answer.results)[len(answer.calls) :]
        return Turn(done=True) if said is None else Turn(said + malformed)

    def close(self) -> None:
        if self.program is not None and not self.program.done():
            loop_beside().call_soon_threadsafe(self.program.cancel)

    async def outcome(self, episode: Ended) -> Any:
        """Returns what the program returns. One that was cut at a limit gets the last turn, and then no more."""
        assert self.program is not None
        if not self.program.done() and self.steps < len(episode.answers):
            await self._go_on(episode.answers[-1])
        self.cut = True
        if not self.program.done():
            self.answered.put_nowait(None)
        return await self.program

    async def _start(self, program: Coroutine[Any, Any, Any]) -> list[Message] | None:
        self.program = asyncio.ensure_future(program)
        return await self._asks()

    async def _go_on(self, said: Answer) -> list[Message] | None:
        self.turns += 1
        self.answered.put_nowait(said)
        return await self._asks()

    async def _asks(self) -> list[Message] | None:
        """Returns what is new in the next prompt of the program; None if the program has ended."""
        assert self.program is not None
        waiting = asyncio.ensure_future(self.asked.get())
        await asyncio.wait([waiting, self.program], return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            self.program.result()
            return None
        prompt, known = waiting.result(), len(self.heard)
        if isinstance(prompt, UserError):
            raise prompt
        if prompt[:known] != self.heard:
            fix = "an environment that only adds messages"
            raise refused(self.name, "rewrites the conversation, and tokens that were drawn cannot be changed", fix)
        self.heard = prompt
        return prompt[known + bool(self.turns) :]


def runs_later(**_: Any) -> str:
    """Returns nothing, instead of a tool's result: the program runs its tools itself, in `step`."""
    return ""
