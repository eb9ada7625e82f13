"""One conversation: the policy's turns, its tool calls, and what the environment says, as spans of an episode.

`Conversation.run` is a generator. It yields what it waits for, a `Wanted` turn of the policy or a Future of something
that runs beside the decode, and is resumed with a Completion or with the Future's result (`conversations.py`).
"""

from __future__ import annotations

import hashlib
import inspect
import math
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

from paddock.config.conversations import with_verl_limits
from paddock.config.roles import MultiTurnConfig
from paddock.core.background import Workers, name_of
from paddock.data.chat import truncated, with_answer
from paddock.data.columns import ENVIRONMENT
from paddock.data.dataset import PromptRow
from paddock.data.dialogue import Dialogue
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.environments.calls import FORMATS, Format
from paddock.environments.catalogue import Factory
from paddock.environments.environment import (
    Answer,
    Call,
    Ended,
    Environment,
    Malformed,
    Message,
    Messages,
    Turn,
    is_written,
    messages_said,
    overrides,
    turn_of,
    with_text,
)
from paddock.environments.tools import Schema, ToolError, ToolFailure, written
from paddock.errors import UserError
from paddock.rollouts.episode import Counts, Episode, Span
from paddock.rollouts.texts import backend_of
from paddock.rollouts.waits import TimeLimit, Waits, Wanted

TIMED_OUT = "the tool took longer than {:g} s"
OPENING_TOKENS = 8  # before a turn, in which the generation prompt may have begun its thinking


class Started(NamedTuple):
    """Holds a tool call that was begun."""

    future: Future[Any]
    own: partial[Any]
    """The call itself, to be repeated in this thread."""


@dataclass(frozen=True)
class ConversationSetting:
    """Holds what all conversations of a run share."""

    limits: MultiTurnConfig
    prompt_length: int
    truncation: str
    dialogue: Dialogue
    format: Format
    tokenizer: Any
    stops: frozenset[int]
    workers: Workers
    deterministic: bool
    hands_environments: bool
    """True: episodes carry their environments, for reward functions that ask for them."""
    routes: bool
    """True: rows name their environments, and environments are not told which column says so, as in TRL."""
    prompted: list[Schema]
    """Schemas of the tools that the prompts of the data were written with."""

    @cached_property
    def decode(self) -> Callable[..., str]:
        """Returns the function that turns tokens into a text, with or without special ones."""
        return (backend_of(self.tokenizer) or self.tokenizer).decode


@dataclass(eq=False)
class Conversation:
    """Holds one episode while it runs."""

    row: PromptRow
    id: int
    """Id of the response."""
    factory: Factory
    setting: ConversationSetting
    sampling: Sampling
    version: int
    """Version of the weights of the session that draws."""
    spans: list[Span] = field(default_factory=list)
    turn: list[Span] = field(default_factory=list)
    """Spans of the turn that was drawn last, until it is read: one for each session that drew a part of it."""
    messages: list[Message] = field(default_factory=list)
    """What was said behind the prompt, as the policy wrote and read it."""
    completion: list[Message] = field(default_factory=list)
    """The same as reward functions read it: calls, texts and thoughts apart, and results as TRL hands them over."""
    results_told: dict[int, Message] = field(default_factory=dict)
    """Results of tools as reward functions read them, by the identity of the message that the policy reads."""
    answers: list[Answer] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    ended: str = ""
    """Why it ended: done, length, turns or timeout."""
    told: dict[str, Any] = field(default_factory=dict)
    """What the environment tells reward functions."""
    held: Any = None
    """The environment, as its author wrote it."""
    calls_limited: bool = True
    """True: verl's limits of calls and results hold where the config sets none."""
    reward_score: float | None = None
    """Score of the episode, if no reward function is to be asked: an agent loop may give one."""
    extends: ClassVar[bool] = True
    """True: each turn goes on from all tokens before it."""
    runs_ahead: ClassVar[bool] = True
    """True if weights of several versions may draw it."""

    @property
    def plain(self) -> bool:
        """True if the prompt is a plain text: messages behind it are appended as they are."""
        return isinstance(self.asked, str)

    @property
    def length(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    @cached_property
    def limits(self) -> MultiTurnConfig:
        """Returns the limits of tool calls in this environment."""
        return with_verl_limits(self.setting.limits) if self.calls_limited else self.setting.limits

    @cached_property
    def most_turns(self) -> float:
        """Returns the most turns of the policy: the environment's limit and the config's."""
        limits = self.setting.limits
        told = [self.factory.max_turns, limits.max_assistant_turns,
                None if limits.max_user_turns is None else limits.max_user_turns + 1]  # fmt: skip
        return min((turns for turns in told if turns is not None), default=math.inf)

    def run(self) -> Generator[Wanted | Future[Any], Any, Episode]:
        """Runs the episode to its end."""
        environment: Environment = yield from self.begun("making it", self.call(self.factory.inline, self.factory.make))
        self.calls_limited = environment.calls_limited
        try:
            yield from self.reset(environment)
            while not self.ended:
                completion: Completion = yield self.wanted()
                yield from self.answered(environment, completion)
            yield from self.pay(environment)
            self.told = dict(environment.told)
            self.held = getattr(environment, "plain", environment)
        finally:
            if overrides(environment, "close"):
                self.setting.workers.end(environment.close)
        return self.episode()

    def reset(self, environment: Environment) -> Waits:
        """Has the environment ask; fills `asked` and `prompt`."""
        said: Messages | None = None
        if overrides(environment, "reset"):
            said = yield from self.begun("reset", self.limited(environment, "reset", self.row_columns(), self.seed))
        self.tools = {tool.name: tool for tool in environment.tools()}
        self.format = FORMATS[environment.call_format] if environment.call_format else self.setting.format
        self.schemas = [tool.schema() for tool in self.tools.values()]
        self.asked: Messages = self.row.messages
        self.written: Messages | None = self.row.written_prompt
        if said is None and self.schemas == self.setting.prompted:
            tokens = self.row.tokens
        else:
            if self.row.images is not None:
                reason = "asks a prompt of its own, and the row's has images"
                raise self.failed(reason, "leave images out, or let reset return None")
            if said is not None:
                self.asked = self.written = self.worded(said)
            tokens = self.setting.dialogue.prompt(self.asked, self.schemas or None)
            tokens = truncated(tokens, self.setting.prompt_length, self.setting.truncation, self.row.location)
        self.prompt = Prompt(tokens, [self.id], self.row.images)

    def worded(self, said: Messages) -> Messages:
        """A text stays one where prompts are plain texts, else it is a message of the user's."""
        messages = self.messages_of(said, "reset")
        if not said:
            reason = f"reset returned {said!r}, which asks nothing"
            raise self.failed(reason, "return a text or messages, or None for the row's own prompt")
        return said if isinstance(said, str) and prompts_are_texts(self.row, self.setting.dialogue) else messages

    def wanted(self) -> Wanted:
        tokens = list(chain(self.prompt.tokens, *(span.tokens for span in self.spans)))
        length, keep = len(tokens) - len(self.prompt.tokens), self.counts.turns + 1 < self.most_turns
        return Wanted(tokens, length, self.sampling.max_tokens - length, keep)

    def keep(self, part: Completion) -> None:
        """Keeps what this session drew of a turn."""
        self.turn.append(Span(part.tokens, part.log_probs, self.version))

    def whole(self, rest: Completion) -> Completion:
        """Returns a turn with all that earlier sessions drew of it."""
        self.keep(rest)
        tokens = [token for span in self.turn for token in span.tokens]
        log_probs = [number for span in self.turn for number in span.log_probs or ()]
        return replace(rest, tokens=tokens, log_probs=log_probs)

    def answered(self, environment: Environment, completion: Completion) -> Waits:
        """Takes a turn of the policy: runs its tool calls, and has the environment say what follows."""
        answer = self.read(completion)
        self.spans += self.turn or [Span(completion.tokens, completion.log_probs, self.version)]
        self.turn = []
        self.counts.turns += 1
        if answer.calls or answer.malformed:
            answer = replace(answer, results=(yield from self.results(answer)))
        self.answers.append(answer)
        self.messages.append({"role": "assistant", "content": answer.text})
        try:
            said = yield from self.limited(environment, "step", answer)
        except TimeLimit:
            self.ended = "timeout"
            return
        if not said and not answer.stopped:
            self.ended = "length"  # the environment says nothing of a turn that did not end by itself
            return
        turn = turn_of(said)
        if paid := self.number(turn.reward, "step"):
            self.spans[-1] = replace(self.spans[-1], reward=paid)
        self.go_on(answer, turn)

    def go_on(self, answer: Answer, turn: Turn) -> None:
        """Appends what the environment said, or ends the episode."""
        if turn.done or (answer.stopped and not turn.messages):
            self.ended = "done"
        elif not answer.stopped:
            self.ended = "length"
        elif self.counts.turns >= self.most_turns:
            self.ended = "turns"
        if self.ended and not turn.messages:
            return
        said = self.messages_of(turn.messages, "step")
        self.messages += said
        told = [self.results_told.get(id(message), message) for message in said]
        if self.ended:
            self.completion += told
            return
        self.counts.said += 1
        tokens = self.setting.dialogue.extension(said, answer.tokens, self.schemas or None, plain=self.plain)
        room = self.sampling.max_tokens - self.length - len(tokens)
        if room >= 0:  # what does not fit is no part of the completion
            self.completion += told
        if room <= 0:
            self.ended = "length"
            return
        self.spans.append(Span(tokens))

    def read(self, completion: Completion) -> Answer:
        """Returns a turn in words, with the tool calls in it; notes it for reward functions."""
        tokens, decode = completion.tokens, self.setting.decode
        text = decode(tokens, skip_special_tokens=True)
        answer = Answer(text, tokens, number=self.counts.turns, stopped=completion.stopped)
        if not self.tools:
            self.completion.append({"role": "assistant", "content": text})
            return answer
        ended = bool(tokens) and tokens[-1] in self.setting.stops
        whole = decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)
        calls, malformed = self.format.parse(whole)
        self.completion.append(self.told_of(text, whole, calls, malformed))
        if not completion.stopped:
            return answer
        self.counts.tool_call_counts += len(calls)
        self.counts.malformed_calls += len(malformed)
        return replace(answer, calls=calls, malformed=malformed)

    def told_of(self, text: str, whole: str, calls: Sequence[Call], malformed: Sequence[Malformed]) -> Message:
        """Returns a turn of the policy as reward functions read it."""
        if malformed and not calls:
            return {"role": "assistant", "content": text}
        tools = self.tools
        typed = [replace(call, arguments=tools[call.name].typed(call.arguments)) if call.name in tools else call
                 for call in calls]  # fmt: skip
        before = self.spans[-1].tokens if self.spans else self.prompt.tokens
        asked = self.setting.decode(before[-OPENING_TOKENS:], skip_special_tokens=False)
        return self.format.message(whole, typed, opened=asked.rstrip().endswith(self.format.thinking[0]))

    def results(self, answer: Answer) -> Waits:
        """Runs the tool calls of a turn and returns the messages that answer them, in their order.

        Functions run side by side; methods of the environment one after the other, since they share its state.
        """
        most, begun = self.limits.max_parallel_calls, time.monotonic()
        started: list[Any] = []
        for call in answer.calls[:most]:
            result = self.started(call)
            if isinstance(result, Started) and inspect.ismethod(self.tools[call.name].function):
                result = yield from self.outcome(*result)
            started.append(result)
        results = []
        for result in started:
            results.append((yield from self.outcome(*result)) if isinstance(result, Started) else result)
        if started:
            self.counts.tool_seconds += time.monotonic() - begun
        if left := answer.calls[len(results) :]:  # one message, however many they are
            reason = f"not run: at most {most} calls of a turn are run, and here are {len(left)} more"
            results.append(ToolFailure(reason))
        messages = [self.answering(call, result) for call, result in zip(answer.calls, results, strict=False)]
        return [*messages, *({"role": "tool", "content": f"error: {bad.reason}"} for bad in answer.malformed)]

    def answering(self, call: Call, result: Any) -> Message:
        """Returns the message that answers a call; notes what reward functions read in its place: TRL's form."""
        text, limits = written(result), self.limits
        content = shortened(text, limits.max_tool_response_length, limits.tool_response_truncate_side)
        message = {"role": "tool", "name": call.name, "content": content}
        message |= {"tool_call_id": call.id} if call.id else {}
        self.counts.cut_results += content is not text
        if content is text:
            told = {"error": result.reason} if isinstance(result, ToolFailure) else result
            self.results_told[id(message)] = {**message, "content": told if isinstance(told, list) else str(told)}
        return message

    def started(self, call: Call) -> Started | ToolFailure:
        """Begins a tool call; a failure says why it cannot be run."""
        tool = self.tools.get(call.name)
        if tool is None:
            self.counts.failed_calls += 1
            return ToolFailure(f"there is no tool {call.name!r}; there are {', '.join(self.tools)}")
        try:
            arguments = tool.arguments(call.arguments)
        except ToolError as error:
            self.counts.failed_calls += 1
            return ToolFailure(str(error))
        own, workers = partial(tool.function, **arguments), self.setting.workers
        if is_awaited(tool.function) or not (tool.inline or workers.belongs_here(tool.function)):
            return Started(workers.start(tool.function, **arguments), own)
        found: Future[Any] = Future()
        try:
            found.set_result(own())
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            found.set_exception(error)
        return Started(found, own)

    def settled(self, future: Future[Any], own: partial[Any]) -> Waits:
        """Waits for a call; one that turns out to need the main thread is repeated there."""
        try:
            return future.result() if future.done() else (yield future)
        except ValueError as error:
            if is_awaited(own.func) or not self.setting.workers.sent_back(name_of(own.func), error):
                raise
            return own()

    def outcome(self, future: Future[Any], own: partial[Any]) -> Waits:
        """Waits for a tool; what it raises is told to the policy."""
        try:
            return (yield from self.settled(future, own))
        except TimeLimit:
            self.counts.timeouts += 1
            self.counts.failed_calls += 1
            return ToolFailure(TIMED_OUT.format(self.setting.limits.tool_timeout))
        except (UserError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # a tool that runs a program may meet its SystemExit
            self.counts.failed_calls += 1
            return ToolFailure(str(error), "" if isinstance(error, ToolError) else type(error).__name__)

    def pay(self, environment: Environment) -> Waits:
        """Adds the environment's reward of the whole episode to the policy's last turn."""
        if not overrides(environment, "reward"):
            return
        messages = with_answer(self.asked, self.messages)
        ended = Ended(self.row_columns(), messages, self.answers, self.ended == "done")
        try:
            paid = self.number((yield from self.limited(environment, "reward", ended)), "reward")
        except TimeLimit:
            return
        last = max(index for index, span in enumerate(self.spans) if span.log_probs)
        self.spans[last] = replace(self.spans[last], reward=self.spans[last].reward + paid)

    def messages_of(self, said: Messages, method: str) -> list[Message]:
        """Returns what a method said as messages, whose contents are texts; anything else is refused."""
        more = ", or paddock.Turn(messages, reward=..., done=...)" if method == "step" else ""
        if not isinstance(said, str | list | tuple) or not all(isinstance(one, dict) for one in messages_said(said)):
            raise self.failed(f"{method} returned {said!r:.80}", f"return a text, a list of messages, or None{more}")
        messages = [with_text(message) for message in messages_said(said)]
        if wrong := next((one for one in messages if not is_written(one)), None):
            reason = f"{method} returned a message without a text as its content, or without a role: {wrong!r:.80}"
            raise self.failed(reason, 'return messages such as {"role": "user", "content": "a text"}')
        return messages

    def number(self, value: Any, method: str) -> float:
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, int | float) or not math.isfinite(number):
            raise self.failed(f"{method} pays {value!r:.80}, which is no finite number", "return a number")
        return float(number)

    def episode(self) -> Episode:
        """Returns what was written: `messages` has the prompt, `conversation` what follows, `ended` why it ended."""
        said: dict[str, Any] = {"messages": self.asked, "conversation": self.messages, "ended": self.ended}
        said |= {"completion": self.completion or self.messages, "written_prompt": self.written}
        counts = self.counts.columns()
        told = {"num_turns": counts["num_turns"], **self.told}
        extras = {**said, "extra_fields": told, "reward_score": self.reward_score, **counts}
        extras |= {"environment": self.held} if self.setting.hands_environments else {}
        done, step = self.ended == "done", self.sampling.step
        return Episode(self.id, self.row, self.prompt, self.spans, done, extras=extras, step=step)

    @property
    def seed(self) -> int:
        """Returns the seed of the environment: equal for all episodes of a group in a step."""
        counters = f"{self.sampling.seed} {self.sampling.step} {self.row.group}"
        return int.from_bytes(hashlib.blake2b(counters.encode(), digest_size=4).digest(), "big") >> 1

    def row_columns(self) -> dict[str, Any]:
        """Returns the row as environments read it."""
        row = self.row
        own = {"prompt": row.messages, "ground_truth": row.ground_truth, "data_source": row.data_source,
               "index": row.index}  # fmt: skip
        hidden = {ENVIRONMENT} if self.setting.routes else {}
        return {**{name: value for name, value in row.extra_info.items() if name not in hidden}, **own}

    def call(self, inline: bool, function: Callable[..., Any], *args: Any) -> Waits:
        """Calls a function here, if it returns at once, else beside the decode."""
        own, workers = partial(function, *args), self.setting.workers
        if inline or workers.belongs_here(function):
            return own()
        try:
            return (yield from self.settled(workers.start(function, *args), own))
        except TimeLimit:
            self.counts.timeouts += 1
            raise

    def begun(self, what: str, waits: Waits) -> Waits:
        """Waits for what no episode begins without: if that takes too long, the run stops."""
        try:
            return (yield from waits)
        except TimeLimit:
            seconds, key = self.setting.limits.tool_timeout, "actor_rollout_ref.rollout.multi_turn.tool_timeout"
            raise self.failed(f"{what} took longer than {seconds:g} s", f"{key}={2 * seconds:g}") from None

    def limited(self, environment: Environment, method: str, *args: Any) -> Waits:
        """Calls a method of the environment; what it raises stops the run and names it."""
        function = getattr(environment, method)
        inline = (environment.inline or not overrides(environment, method)) and not is_awaited(function)
        try:
            return (yield from self.call(inline, function, *args))
        except (TimeLimit, UserError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self.failed(f"{method} raised {type(error).__name__}: {error}", "mend the environment") from error

    def failed(self, reason: str, fix: str) -> UserError:
        return UserError(f"{reason}, {self.row.location}", key="environment", value=self.factory.name, fix=fix)


def is_awaited(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def prompts_are_texts(row: PromptRow, dialogue: Dialogue) -> bool:
    """True if an environment's texts are prompts as they are: the row's own prompt is a plain text, or it has none and
    there is no chat template."""
    return isinstance(row.messages, str) and (bool(row.messages.strip()) or dialogue.template is None)


def shortened(text: str, most: int | None, side: str) -> str:
    """Returns at most so many characters of a text, cut on a side or in the middle, and says so."""
    if most is None or len(text) <= most:
        return text
    if side == "right":
        return f"{text[:most]}...(truncated)"
    if side == "left":
        return f"(truncated)...{text[-most:]}"
    half = most // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"
