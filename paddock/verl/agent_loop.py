"""Agent loops in verl's form: a coroutine that asks for turns of the policy, and returns tokens with a mask.

The coroutine runs in the event loop of the environments' workers. What it asks of `server_manager.generate` becomes a
turn of the conversation's generator. What it returns is checked: every token under a mask of 1 was drawn by the policy
in this episode, behind the very tokens that stand before it. So what is trained on is what was drawn.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, takewhile
from typing import Any

from paddock.data.dialogue import Dialogue
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.environments.environment import messages_said
from paddock.errors import UserError
from paddock.facts.modules import exception_text
from paddock.rollouts.conversation import Conversation
from paddock.rollouts.episode import Episode, Span
from paddock.rollouts.waits import TimeLimit, Wanted
from paddock.verl.classes import taken
from paddock.verl.loop_factory import LoopFactory

ROLLOUT = "actor_rollout_ref.rollout"
LENGTHS = ("max_tokens", "max_new_tokens")
PLAIN = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1, "best_of": 1,
    "seed": None, "stop_regex": None, "bad_words": None, "logit_bias": None,
}  # fmt: skip
"""Sampling parameters that nothing is done for: this value is taken, and any other refused."""
UNREAD = frozenset({"logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
                    "include_stop_str_in_output", "no_stop_trim"})  # fmt: skip
"""Sampling parameters that change no token."""


class TokenOutput(list[int]):
    """Holds a turn of the policy: a list of its tokens, as verl 0.5 returned it, with the fields of later versions."""

    def __init__(
        self, token_ids: Sequence[int] = (), log_probs: Sequence[float] | None = None, stop_reason: str | None = None,
        num_preempted: int | None = None, routed_experts: Any = None, extra_fields: dict[str, Any] | None = None,
    ):  # fmt: skip
        super().__init__(token_ids)
        self.token_ids, self.log_probs = list(token_ids), None if log_probs is None else list(log_probs)
        self.stop_reason, self.num_preempted, self.routed_experts = stop_reason, num_preempted, routed_experts
        self.extra_fields = extra_fields or {}


@dataclass(frozen=True)
class AskedTurn:
    """Holds a turn that a loop waits for."""

    tokens: list[int]
    limit: int
    answer: asyncio.Future[TokenOutput]


@dataclass(frozen=True)
class DrawnTurn:
    """Holds a turn that was drawn: the tokens before it, and the completion."""

    before: list[int]
    completion: Completion


class Mailbox:
    """Takes what a coroutine asks for; a generator waits for it in Futures."""

    def __init__(self) -> None:
        self.lock, self.letters = threading.Lock(), deque[Any]()
        self.reader: Future[Any] | None = None

    def put(self, letter: Any) -> None:
        with self.lock:
            self.letters.append(letter)
            self._deliver()

    def next(self) -> Future[Any]:
        with self.lock:
            reader = self.reader = Future()
            self._deliver()
            return reader

    def _deliver(self) -> None:
        if self.letters and self.reader is not None:
            reader, self.reader = self.reader, None
            if reader.set_running_or_notify_cancel():
                reader.set_result(self.letters.popleft())


class ServerManager:
    """Stands where verl's loops expect their servers: `generate` draws a turn of the policy."""

    def __init__(self, conversation: LoopConversation):
        self.conversation = conversation

    @property
    def dialogue(self) -> Dialogue:
        return self.conversation.setting.dialogue

    async def generate(
        self, request_id: Any = None, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any] | None = None,
        image_data: Any = None, video_data: Any = None, **more: Any,
    ) -> TokenOutput:  # fmt: skip
        """Draws until a stop token or the limit. `request_id` is not needed: tokens tell what is known already."""
        own, answer = self.conversation, asyncio.get_running_loop().create_future()
        try:
            given = {"image_data": image_data, "video_data": video_data, **more}
            asked = own.request(prompt_ids, sampling_params or {}, given, answer)
        except UserError as error:
            own.mail.put(error)  # and not raised here: a loop may catch what it likes
            return await answer
        if asked.limit <= 0:
            return TokenOutput(stop_reason="completed", log_probs=())
        own.mail.put(asked)
        return await answer


@dataclass(eq=False)
class LoopConversation(Conversation):
    """Holds one episode of an agent loop while it runs."""

    factory: LoopFactory
    extends = False
    runs_ahead = False
    mail: Mailbox = field(default_factory=Mailbox)
    drawn: list[DrawnTurn] = field(default_factory=list)
    position: int = 0
    """Numbers that were used of the episode's randomness: two turns behind equal tokens are two draws."""
    num_turns: int = 0
    was_cut: bool = False
    """True if the last turn ended at a limit."""

    def whole(self, rest: Completion) -> Completion:
        """Returns the turn as it is: one session draws it."""
        return rest

    def run(self) -> Generator[Wanted | Future[Any], Any, Episode]:
        if self.row.images is not None:
            raise self.refused("the row has images, and agent loops run on texts", "leave the images out")
        self.asked, self.written = self.row.messages, self.row.written_prompt
        task = self.setting.workers.begin(self.play())
        task.add_done_callback(self.mail.put)
        try:
            output = yield from self.served()
            self.take(output)
        except TimeLimit:
            self.cut_short()
        finally:
            task.cancel()
        return self.episode()

    def served(self) -> Generator[Wanted | Future[Any], Any, Any]:
        """Draws what the loop asks for until it returns."""
        while True:
            letter = yield self.mail.next()
            if isinstance(letter, UserError):
                raise letter
            if isinstance(letter, Future):
                return self.returned(letter)
            wanted = self.wanted_of(letter)
            completion: Completion = yield wanted
            self.position = wanted.start + len(completion.tokens)
            self.drawn.append(DrawnTurn(wanted.tokens, completion))
            output = TokenOutput(completion.tokens, completion.log_probs, "completed")
            letter.answer.get_loop().call_soon_threadsafe(answered, letter.answer, output)

    def wanted_of(self, asked: AskedTurn) -> Wanted:
        """Returns the turn; keys and values of the last one stay if its tokens are those before this one."""
        first = len(self.drawn[0].before) if self.drawn else len(asked.tokens)
        last = [*self.drawn[-1].before, *self.drawn[-1].completion.tokens] if self.drawn else []
        start = max(self.position, len(asked.tokens) - first)
        return Wanted(asked.tokens, start, asked.limit, keep=True, anew=asked.tokens[: len(last)] != last)

    # The loop's side, in the event loop

    async def play(self) -> Any:
        """Makes the loop and runs it."""
        tokenizer = copy.copy(self.setting.tokenizer)
        # Loops were written for a transformers that returned token ids where it returns a dict now.
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
        given = {**self.factory.arguments, "server_manager": ServerManager(self), "tokenizer": tokenizer}
        loop = self.factory.loop(**taken(self.factory.loop, given))
        sampling, row = parameters_of(self.sampling), self.row_arguments()
        if [*inspect.signature(loop.run).parameters][:1] == ["messages"]:  # verl 0.5
            return await loop.run(row["raw_prompt"], sampling)
        return await loop.run(sampling, **taken(loop.run, row))

    def row_arguments(self) -> dict[str, Any]:
        """Returns the row as verl's data set gives it."""
        row, info = self.row, copy.deepcopy(self.row.extra_info)
        return {
            "raw_prompt": copy.deepcopy(messages_said(row.messages)),
            "data_source": row.data_source,
            "reward_model": {"style": row.style, "ground_truth": row.ground_truth},
            "extra_info": info,
            "index": info.get("index", row.index),
            "uid": str(row.group),
            "multi_modal_data": {},
            **{name: info.get(name) or {} for name in ("tools_kwargs", "interaction_kwargs")},
        }

    def request(
        self, tokens: Sequence[int], parameters: Mapping[str, Any], more: Mapping[str, Any], answer: asyncio.Future[Any]
    ) -> AskedTurn:
        """Returns a turn that is asked for, once it is one that can be drawn."""
        if seen := [name for name, value in more.items() if name != "priority" and value]:
            raise self.refused(f"generate is given {seen[0]}, and agent loops run on texts", f"leave {seen[0]} out")
        prompt = [int(token) for token in tokens]
        if not prompt:
            raise self.refused("generate is given no tokens", "prompt_ids=[...]")
        other = unlike(parameters, self.sampling, self.setting.stops)
        if other is not None:
            reason = f"generate is given {other}={parameters[other]!r:.80}, and all turns of a step are drawn alike"
            fix = f"; {ROLLOUT}.{other} sets it for the whole run" if other in own_parameters(self.sampling) else ""
            raise self.refused(reason, f"leave it out{fix}")
        room = self.setting.prompt_length + self.sampling.max_tokens - len(prompt)
        if room <= 0 and not self.drawn:
            reason = f"generate is given a prompt of {len(prompt)} tokens, which leaves no room for a turn"
            raise self.refused(reason, f"data.max_prompt_length={len(prompt)}")
        limits = [int(parameters[name]) for name in LENGTHS if parameters.get(name) is not None]
        return AskedTurn(prompt, min(room, self.sampling.max_tokens, *limits), answer)

    # What the loop returned

    def returned(self, task: Future[Any]) -> Any:
        try:
            return task.result()
        except UserError:
            raise
        except (CancelledError, asyncio.CancelledError):
            raise self.refused("was cancelled", "return an AgentLoopOutput") from None
        except BaseException as error:
            raise self.refused(f"raised {exception_text(error)}", "mend the agent loop") from error

    def take(self, output: Any) -> None:
        """Turns what the loop returned into spans, metrics and a score."""
        if isinstance(output, list) and len(output) == 1:
            output = output[0]
        if not hasattr(output, "response_mask"):
            what = f"{len(output)} outputs" if isinstance(output, list) else f"a {type(output).__name__}"
            raise self.refused(f"returned {what}", "return one AgentLoopOutput: an episode is one sequence")
        tokens, mask = [int(token) for token in output.response_ids], [bool(own) for own in output.response_mask]
        prompt = [int(token) for token in output.prompt_ids]
        self.check(prompt, tokens, mask)
        self.prompt, self.spans = Prompt(prompt, [self.id]), self.spans_of(prompt, tokens, mask)
        metrics, fields = getattr(output, "metrics", None) or {}, dict(getattr(output, "extra_fields", None) or {})
        tools = metrics.get("tool_calls") if isinstance(metrics, Mapping) else getattr(metrics, "tool_calls", 0.0)
        self.finish(getattr(output, "num_turns", 0), float(tools or 0.0))
        self.told = {**fields, "num_turns": self.num_turns}
        score = getattr(output, "reward_score", None)
        if score is not None:
            self.reward_score = self.number(score, "the loop")
            self.spans = paid(self.spans, self.reward_score)

    def check(self, prompt: list[int], tokens: list[int], mask: list[bool]) -> None:
        longest = self.sampling.max_tokens
        if len(tokens) != len(mask):
            raise self.refused(f"returned {len(tokens)} response_ids and {len(mask)} entries of response_mask",
                               "one for each token")  # fmt: skip
        if len(tokens) > longest:
            reason = f"returned {len(tokens)} response_ids, more than data.max_response_length={longest}"
            raise self.refused(reason, "response_ids[: self.config.actor_rollout_ref.rollout.response_length]")
        if not prompt:
            raise self.refused("returned no prompt_ids", "the tokens before the first response")
        if len(prompt) > self.setting.prompt_length:
            reason = f"returned {len(prompt)} prompt_ids, more than data.max_prompt_length={self.setting.prompt_length}"
            raise self.refused(reason, f"data.max_prompt_length={len(prompt)}")

    def spans_of(self, prompt: list[int], tokens: list[int], mask: list[bool]) -> list[Span]:
        """Returns the response as spans. A token of the policy has the log-prob with which it was drawn behind the very
        tokens that stand before it."""
        log_probs, ends = self.drawn_in_place(prompt, tokens)
        if drifted := [at for at, wrote in enumerate(mask) if wrote and at not in log_probs]:
            raise self.drifted(tokens, drifted, sum(mask))
        last = max((at for at, wrote in enumerate(mask) if wrote), default=-1)
        self.was_cut = ends.get(last) is False or (len(tokens) == self.sampling.max_tokens and not ends.get(last))
        spans = []
        for wrote, places in groupby(range(len(tokens)), key=lambda at: mask[at]):
            at = list(places)
            own = tokens[at[0] : at[-1] + 1]
            spans.append(Span(own, [log_probs[place] for place in at], self.version) if wrote else Span(own))
        return spans

    def drawn_in_place(self, prompt: list[int], tokens: list[int]) -> tuple[dict[int, float], dict[int, bool]]:
        """Returns the log-probs of the response's tokens that were drawn where they stand, and whether the turns that
        end at a token were stopped; both by the token's index."""
        log_probs, ends, whole = dict[int, float](), dict[int, bool](), prompt + tokens
        for turn in self.drawn:
            if whole[: len(turn.before)] != turn.before:
                continue
            begin, completion = len(turn.before), turn.completion
            pairs = zip(completion.tokens, whole[begin:], strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            begin -= len(prompt)
            log_probs |= {begin + at: completion.log_probs[at] for at in range(same)}
            if same == len(completion.tokens):
                ends[begin + same - 1] = completion.stopped
        return log_probs, ends

    def drifted(self, tokens: list[int], places: list[int], wrote: int) -> UserError:
        text = self.setting.tokenizer.decode([tokens[places[0]]])
        reason = (
            f"returned a response_mask of 1 for {len(places)} of {wrote} tokens that generate did not draw there: the "
            f"first is token {places[0]} of the response, {text!r}"
        )
        fix = "append token_ids as generate returned them to prompt_ids, and never encode a turn again"
        return self.refused(reason, fix)

    def finish(self, turns: int, tool_seconds: float) -> None:
        """Notes what the episode was: its turns in words, how many, and whether it was cut."""
        wrote = [span for span in self.spans if span.log_probs]
        decode = partial(self.setting.tokenizer.decode, skip_special_tokens=True)
        self.messages = [
            {"role": "assistant" if span.log_probs else "user", "content": decode(span.tokens)} for span in self.spans
        ]
        self.counts.turns, self.counts.said = len(wrote), len(self.spans) - len(wrote)
        self.counts.tool_seconds = tool_seconds
        self.num_turns = int(turns) or self.counts.columns()["num_turns"]
        self.ended = self.ended or ("length" if self.was_cut else "done")

    def cut_short(self) -> None:
        """Keeps what was drawn by a loop that took too long: the turns that go on from one another."""
        self.counts.timeouts += 1
        seconds = f"{self.setting.limits.tool_timeout:g} s"
        if not self.drawn:
            raise self.refused(f"took longer than {seconds} before it asked for a turn",
                               f"{ROLLOUT}.multi_turn.tool_timeout=...")  # fmt: skip
        prompt = self.drawn[0].before[: self.setting.prompt_length]
        whole, mask = list(self.drawn[0].before), list[bool]()
        for turn in self.drawn:
            if turn.before[: len(whole)] != whole:
                break
            mask += [False] * (len(turn.before) - len(whole)) + [True] * len(turn.completion.tokens)
            whole = turn.before + turn.completion.tokens
        most = self.sampling.max_tokens
        self.ended, self.prompt = "timeout", Prompt(prompt, [self.id])
        self.spans = self.spans_of(prompt, whole[len(prompt) :][:most], mask[:most])
        self.finish(0, 0.0)

    def episode(self) -> Episode:
        episode = super().episode()
        return replace(episode, extras={**episode.extras, "num_turns": self.num_turns})

    def refused(self, reason: str, fix: str) -> UserError:
        key = f"{ROLLOUT}.agent.default_agent_loop" if self.row.agent is None else "agent_name"
        return UserError(f"{reason}, {self.row.location}", key=key, value=self.factory.name, fix=fix)

    failed = refused


def own_parameters(sampling: Sampling) -> dict[str, Any]:
    """Returns what is set for a session, by the names of parameters."""
    names = ("temperature", "top_p", "top_k", "min_p", "ignore_eos", "min_tokens")
    return {**{name: getattr(sampling, name) for name in names}, "stop": list(sampling.stop)}


def parameters_of(sampling: Sampling) -> dict[str, Any]:
    """Returns the sampling as verl's loops are given it."""
    own = own_parameters(sampling)
    return {**{name: own[name] for name in ("temperature", "top_p", "top_k")}, "repetition_penalty": 1.0,
            "logprobs": True}  # fmt: skip


def unlike(parameters: Mapping[str, Any], sampling: Sampling, stops: frozenset[int]) -> str | None:
    """Returns the first parameter that asks for another sampling than the session's."""
    known = {**PLAIN, **own_parameters(sampling)}
    for name, value in parameters.items():
        if name in LENGTHS or name in UNREAD or (name == "stop_token_ids" and {*(value or ())} <= stops):
            continue
        if name == "stop":
            value = [value] if isinstance(value, str) else list(value or ())
        if name not in known or (value != known[name] and (value or known[name] is not None)):
            return name
    return None


def paid(spans: list[Span], reward: float) -> list[Span]:
    """Returns the spans with a reward for the policy's last one, if it wrote any."""
    last = max((index for index, span in enumerate(spans) if span.log_probs), default=None)
    return [replace(span, reward=reward) if index == last else span for index, span in enumerate(spans)]


def answered(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
