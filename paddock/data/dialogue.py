"""Conversations of several turns in tokens: what stands between two turns of the policy is appended to what it drew.

Nothing that was sampled is decoded and encoded again. A chat template renders a short conversation with a mark in place
of the policy's turn, and the text behind the mark is tokenised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paddock.data.chat import MARK, ONLY_TOKENS, Message, Messages, PromptEncoder, limited
from paddock.data.tails import Around, around, texts_read
from paddock.errors import UserError

Tools = Sequence[dict[str, Any]]

TEMPLATE_KEY = "data.apply_chat_template_kwargs.chat_template"
ASKED, SAID, TOLD = "~asked~", "~said {}~", "~told what it does~"
QUESTION: list[Message] = [{"role": "user", "content": ASKED}]
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": TOLD,
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "text"}}},
    },
}
OPENED = re.compile(r"<think>\s*(</think>\s*)?$")
EMPTY = re.compile(r"^\s*<think>\s*</think>\s*")
FORMS_KEPT = 256
"""Sets of tools whose encoders are kept: episodes may have tools of their own."""


@dataclass(frozen=True)
class Stand:
    """Says what stands for the policy's turn where messages behind it are rendered, and how its end is found."""

    calls: int | None
    """Tool calls in it; None: as many as there are tool messages behind it."""
    content: bool
    """True: it has a text beside its tool calls."""
    objects: bool
    """True: arguments of calls are objects, False: JSON texts."""
    marks: int = 1
    """How often the mark is rendered."""
    end: str = ""
    """Text of the stop token behind the last mark; empty: the turn's end is no stop token."""
    tools: bool = False
    """True: the rendering needs to know the tools."""


ANSWER = Stand(calls=0, content=True, objects=True)
CALLING = [Stand(calls, content, objects) for objects in (True, False) for content in (True, False)
           for calls in (None, 1)]  # fmt: skip


class Dialogue:
    """Writes prompts, and what stands between the turns of the policy, as tokens. Thread-safe as its encoder is.

    `stops` are the tokens that end a turn of the policy. Templates may depend on the messages and nothing else.
    """

    def __init__(self, encoder: PromptEncoder, stops: frozenset[int]):
        self.encoder, self.stops, self.tokenizer = encoder, stops, encoder.tokenizer
        self._stands: dict[tuple[tuple[str, ...], bool], Stand] = {}
        self._encoders: dict[tuple[str, bool, bool], PromptEncoder] = {}
        self._around: dict[Any, Around | None] = {}

    def prompt(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        """Returns the tokens of a prompt: a plain text as it is, messages by the template with the tools and the
        generation prompt."""
        return self.prompts([messages], None if isinstance(messages, str) else tools, ["an episode"], "prompt")[0]

    def prompts(
        self, many: Sequence[Messages], tools: Tools | None, locations: Sequence[str], column: str
    ) -> list[list[int]]:
        """Returns the tokens of prompts that have the same tools; `locations` and `column` name a bad one."""
        return self._encoder(tools).encode(many, locations, column)

    def extension(
        self, messages: Sequence[Message], answer: Sequence[int], tools: Tools | None = None, plain: bool = False
    ) -> list[int]:
        """Returns the tokens between a turn of the policy and its next one: the turn's end if it was not drawn, what
        separates turns, the messages, and the generation prompt.

        `answer` are the turn's tokens; the last is a stop token unless the turn was cut. All messages between the two
        turns come in one call, in order. `plain`: the prompt is a plain text, and contents follow as they are.
        """
        messages = [readable(message) for message in messages]
        if plain:
            return self._tokens("".join(text_of(message.get("content")) for message in messages))
        return self._behind_drawn(self._tokens(self._behind(messages, tools)), answer)

    def _behind_drawn(self, tokens: list[int], answer: Sequence[int]) -> list[int]:
        """Returns the tokens behind a turn without its end, if that was drawn."""
        ended = answer and answer[-1] in self.stops and tokens and self.ends_alike(answer[-1], tokens[0])
        return tokens[1:] if ended else tokens

    def spans(self, messages: Sequence[Message], tools: Tools | None = None) -> list[tuple[list[int], bool]]:
        """Returns a whole conversation as stretches of tokens, and whether the assistant wrote them.

        They are what a rollout would hold that drew the assistant's turns: contents as they are, each with its end of
        turn; turns with tool calls as the template writes them. What stands behind the last turn is left out.
        """
        with limited("a conversation", "messages"):
            first, turns = self.turns(messages, tools)
        return [(self.prompt(list(messages[:first]), tools), False), *turns]

    def turns(
        self, messages: Sequence[Message], tools: Tools | None = None
    ) -> tuple[int, list[tuple[list[int], bool]]]:
        """Returns the index of the assistant's first message, and the stretches from there on; see `spans`. The caller
        limits the time that templates take: a limit for each would take longer than they do."""
        turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns or turns[0] == 0:
            reason = "there is no message of the assistant" if not turns else "it begins with the assistant"
            raise UserError(f"{reason}: nothing answers a question", key="messages", fix="user first, then assistant")
        stretches: list[tuple[list[int], bool]] = []
        for index, following in zip(turns, [*turns[1:], None], strict=True):
            turn, behind = messages[index], messages[index + 1 : following]
            between = self.extension(behind, [], tools) if behind or following is not None else []
            end = self._end(turn, between, tools)
            stretches.append(([*self._written(turn, tools), end], True))
            if following is not None:
                stretches.append((self._behind_drawn(between, [end]), False))
        return turns[0], stretches

    # What stands behind a turn

    def _behind(self, messages: Sequence[Message], tools: Tools | None) -> str:
        """Returns the text from the end of the policy's turn to the generation prompt.

        Contents that the template writes as they are need no rendering, which takes half a millisecond.
        """
        contents = [message.get("content") for message in messages]
        if not all(isinstance(text, str) and not any(read in text for read in self._texts_read) for text in contents):
            return self._rendered_behind(messages, tools)
        key = tuple((message.get("role"), *sorted(message)) for message in messages), bool(tools)
        if key not in self._around:
            whole = [PROBE_TOOL] if tools else None
            self._around[key] = around(messages, lambda others: self._rendered_behind(others, whole))
        way = self._around[key]
        return self._rendered_behind(messages, tools) if way is None else way.text([str(text) for text in contents])

    def _rendered_behind(self, messages: Sequence[Message], tools: Tools | None) -> str:
        stand = self._stand(tuple(str(message.get("role")) for message in messages), bool(tools))
        try:
            return self._tail(stand, messages, tools)
        except UserError:
            if not any(message.get("role") == "tool" for message in messages):
                raise
            # Some templates demand ids of a certain form, and the policy may have written others.
            return self._tail(stand, [without(message, "tool_call_id") for message in messages], tools)

    def _tail(self, stand: Stand, messages: Sequence[Message], tools: Tools | None) -> str:
        messages = with_ids(messages)
        encoder = self._encoder(tools, shown=stand.tools)
        # Without a limit of time, which would take longer than the template: these roles were rendered under one.
        text = encoder.rendered([*stand_in(stand, messages), *messages], "a turn", "messages")
        tail = text.split(MARK, stand.marks)[-1]
        if stand.end not in tail:
            raise UserError(f"the template ends this turn without {stand.end}", key=TEMPLATE_KEY)
        return tail[tail.index(stand.end) :]

    def _stand(self, roles: tuple[str, ...], tools: bool) -> Stand:
        """Returns the first form of the policy's turn behind which the template writes all that follows, in order."""
        if (roles, tools) in self._stands:
            return self._stands[roles, tools]
        messages = with_ids([{"role": role, "content": SAID.format(index)} for index, role in enumerate(roles)])
        if self.template is None:
            self._rendered(self.encoder, messages)  # says so
        known = [PROBE_TOOL] if tools else None
        reasons: list[str] = []
        for form in [*(CALLING if "tool" in roles else ()), ANSWER]:
            stands = []
            for shown in (False, True) if tools else (False,):
                try:
                    stands.append(self._checked(replace(form, tools=shown), messages, known))
                except UserError as error:
                    reasons.append(error.reason)
            if stands:
                # A template that repeats the tools behind the last question must not: the prompt has them already.
                first, last = (self._tail(stand, messages, known) for stand in (stands[0], stands[-1]))
                self._stands[roles, tools] = stands[0] if TOLD in last or first == last else stands[-1]
                return self._stands[roles, tools]
        raise refusal(roles, reasons)

    def _checked(self, form: Stand, messages: Sequence[Message], tools: Tools | None) -> Stand:
        """Returns the form with its marks counted and its end found; a UserError says what the template does not
        write."""
        text = self._rendered(self._encoder(tools, shown=form.tools), [*stand_in(form, messages), *messages])
        contents = [str(message["content"]) for message in messages]
        marks = text.count(MARK)
        tail = text.split(MARK)[-1]
        missing = next((at for at, content in enumerate(contents) if content not in tail), None)
        if not marks:
            raise UserError("the template does not write the turn of the assistant")
        if missing is not None:
            said = "elsewhere than behind the answer" if contents[missing] in text else "nowhere"
            raise UserError(f"the template writes the content of role {messages[missing]['role']!r} {said}")
        if sorted(contents, key=tail.index) != contents:
            raise UserError("the template changes the order of the messages")
        closed = tail[: tail.index(contents[0])] if contents else tail
        places = {closed.find(stop): stop for stop in sorted(self._stop_texts, key=len) if stop in closed}
        if not places and form.calls != 0:
            raise UserError("the template ends a turn with tool calls by no stop token of the model")
        return replace(form, marks=marks, end=places[min(places)] if places else "")

    def ends_alike(self, drawn: int, first: int) -> bool:
        """True if the stop token that was drawn stands for the token that the template ends the turn with.

        A family can have several ends of a turn (Llama's <|eom_id|>, gpt-oss's <|call|>); its template names them. An
        end of text that the template does not name ends no turn: the turn's own end follows it.
        """
        return drawn == first or (drawn in self._named_ends and self.is_special(first))

    @cached_property
    def _named_ends(self) -> frozenset[int]:
        """Stop tokens that the template's own text names. Empty if the next turn's header is what ends a turn."""
        if not self.closing:
            return frozenset()
        template = self.template or ""
        return frozenset(stop for stop in self.stops if self.text([stop]) in template)

    @cached_property
    def closing(self) -> list[int]:
        """The tokens behind an answer that ends a conversation; empty if the template writes none, or refuses one."""
        for tools in (None, [PROBE_TOOL]):  # some templates are for tools alone
            with suppress(UserError):
                return self._encoder(tools).closing
        return []

    @property
    def template(self) -> str | None:
        """The text of the chat template; None if there is none."""
        named = self.encoder.template_kwargs.get("chat_template")
        if named is None and self.tokenizer.chat_template is None:
            return None
        return str(self.tokenizer.get_chat_template(named, [PROBE_TOOL]))

    # What the assistant wrote, in data

    def _written(self, turn: Message, tools: Tools | None) -> list[int]:
        """Returns a turn of the assistant's as the policy would have drawn it, without its end."""
        if turn.get("tool_calls") or turn.get("reasoning_content") or turn.get("thinking"):
            return self._rendered_turn(turn, tools)
        text, (before, extra, behind) = text_of(turn.get("content")), self._frame
        text = text[overlap(before, text) :] if text.startswith(extra) else extra + text
        return self._tokens(text if text.endswith(behind) else text + behind)

    @cached_property
    def _frame(self) -> tuple[str, str, str]:
        """Returns three texts: a question with its generation prompt; what the template writes between that and the
        content of an answer, without thinking (Mistral's space, gpt-oss's channel); and what it writes between the
        content and the end of turn (Cohere's own mark)."""
        for tools in (None, [PROBE_TOOL]):  # some templates are for tools alone
            with suppress(UserError):
                before = self._rendered(self._encoder(tools), QUESTION)
                marked: list[Message] = [*QUESTION, {"role": "assistant", "content": MARK}]
                header, *_, tail = self.without_generation_prompt(marked, tools).split(MARK)
                extra = header[len(before) :] if header.startswith(before) else ""
                ends = [tail.index(stop) for stop in self._stop_texts if stop in tail]
                return before, "" if "think" in extra else extra, tail[: min(ends, default=0)]
        return "", "", ""

    def _rendered_turn(self, turn: Message, tools: Tools | None) -> list[int]:
        """Returns what the template writes behind the generation prompt for a turn with more than a content."""
        thought = str(turn.get("reasoning_content") or turn.get("thinking") or "").strip()
        calls = [call.get("function", call) for call in turn.get("tool_calls") or ()]
        needed = [thought, *(str(call.get("name")) for call in calls)]
        empty = {} if turn.get("content") else {"content": None}
        before = self._encoder(tools).rendered(QUESTION, "a turn", "messages")
        plain = self._encoder(tools, generation=False)
        for form in (with_arguments(turn, True), with_arguments(turn, False), with_arguments(turn, False) | empty):
            with suppress(UserError):
                whole = plain.rendered([*QUESTION, form], "a turn", "messages")
                for start in (before, OPENED.sub("", before)):  # thinking that the prompt opens may be left out
                    text = whole[len(start) :]
                    if whole.startswith(start) and all(part in text for part in needed):
                        text = text[overlap(before, text) :]
                        tokens = self._tokens(text if thought else EMPTY.sub("", text))
                        return tokens[: next((at for at, token in enumerate(tokens) if token in self.stops), None)]
        reason = "the chat template does not write the assistant's tool calls or thinking behind its generation prompt"
        raise UserError(reason, key=TEMPLATE_KEY, fix="write them in the content, as the model would")

    def _end(self, turn: Message, between: list[int], tools: Tools | None) -> int:
        """Returns the stop token that ends a turn of the assistant's; `between` is what follows it, if there is any."""
        ends = [between or self.closing]
        with suppress(UserError):
            calls = bool(turn.get("tool_calls"))
            if not between:  # a family may end calls otherwise, or by the header of what follows
                said: Message = {"role": "tool" if calls else "user", "content": ASKED}
                ends.insert(0 if calls else 1, self.extension([said], [], tools))
        stops = (tokens[0] for tokens in [*ends, self.closing] if tokens and tokens[0] in self.stops)
        return int(next(stops, self.tokenizer.eos_token_id))

    # Texts and tokens

    def without_generation_prompt(self, messages: list[Message], tools: Tools | None = None) -> str:
        """Returns messages as the template writes them if no turn of the policy follows."""
        return self._rendered(self._encoder(tools, generation=False), messages)

    def text(self, tokens: Sequence[int]) -> str:
        """Returns tokens as text, with special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _tokens(self, text: str) -> list[int]:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # the same, in a fifth of the time
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer(text, add_special_tokens=False, **ONLY_TOKENS)["input_ids"])

    @cached_property
    def _texts_read(self) -> tuple[str, ...]:
        return texts_read(self.template or "")

    @cached_property
    def _stop_texts(self) -> list[str]:
        return [text for text in map(self.text, ([stop] for stop in sorted(self.stops))) if text]

    def is_special(self, token: int) -> bool:
        """True if the token is one of structure, not of text."""
        added = self.tokenizer.added_tokens_decoder.get(token)
        return added is not None and added.special

    def _rendered(self, encoder: PromptEncoder, messages: list[Message]) -> str:
        return encoder.render([messages], ["a turn"], "messages")[0]

    def _encoder(self, tools: Tools | None, shown: bool = True, generation: bool = True) -> PromptEncoder:
        """Returns the encoder whose template gets these tools; not `shown`: the template that they choose, without
        them."""
        if not tools and generation:
            return self.encoder
        key = (json.dumps(tools, default=str) if tools and shown else str(bool(tools)), shown, generation)
        encoder = self._encoders.get(key)
        if encoder is None:
            more: dict[str, Any] = {} if generation else {"add_generation_prompt": False}
            if tools and shown:
                more["tools"] = list(tools)
            elif tools and (template := self.template) is not None:
                more["chat_template"] = template
            encoder = PromptEncoder(self.tokenizer, {**self.encoder.template_kwargs, **more})
            if len(self._encoders) >= FORMS_KEPT:
                self._encoders.clear()
            self._encoders[key] = encoder
        return encoder


def stand_in(stand: Stand, messages: Sequence[Message]) -> list[Message]:
    """Returns a question, and a turn of the assistant's with the mark in it, to which the messages could be the
    reply."""
    turn: Message = {"role": "assistant", "content": MARK if stand.content else ""}
    answered = [message for message in messages if message.get("role") == "tool"]
    if stand.calls != 0:
        turn["tool_calls"] = [
            {
                "id": message["tool_call_id"],
                "type": "function",
                "function": {
                    "name": str(message.get("name") or "tool"),
                    "arguments": {"x": MARK} if stand.objects else json.dumps({"x": MARK}),
                },
            }
            for message in answered[: stand.calls]
        ]
    return [*QUESTION, turn]


def with_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns messages in which those of tools have an id of a call: nine letters and digits, as Mistral demands."""

    def named(index: int, message: Message) -> Message:
        missing = message.get("role") == "tool" and not message.get("tool_call_id")
        return {**message, "tool_call_id": f"call{index:05d}"} if missing else message

    return [named(index, message) for index, message in enumerate(messages)]


def readable(message: Message) -> Message:
    """Returns a message whose content is Unicode: what a tool returns may hold half of a surrogate pair."""
    content = message.get("content")
    if isinstance(content, str) and not content.isascii():
        return {**message, "content": content.encode(errors="replace").decode()}
    return message


def without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def with_arguments(turn: Message, objects: bool) -> Message:
    """Returns a turn whose tool calls have their arguments as objects, or as JSON texts."""
    calls = []
    for call in turn.get("tool_calls") or ():
        function = dict(call.get("function", call))
        arguments = function.get("arguments")
        if objects and isinstance(arguments, str):
            with suppress(ValueError):
                function["arguments"] = json.loads(arguments)
        elif not objects and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        calls.append({"type": "function", **without(call, "function"), "function": function})
    return {"content": "", **turn, "tool_calls": calls} if calls else turn


def overlap(before: str, text: str) -> int:
    """Returns how much of a text's start, <think> and line breaks, the generation prompt has written already."""
    longest = min(len(before), len(text)) if text.startswith("<think>") else 0
    return next((size for size in range(longest, 0, -1) if before.endswith(text[:size])), 0)


def text_of(content: Any) -> str:
    """Returns the content of a message as a text; parts of other kinds have none."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def refusal(roles: Sequence[str], reasons: Sequence[str]) -> UserError:
    said = dict.fromkeys(reason.removeprefix("the chat template refuses it: ") for reason in (reasons[0], reasons[-1]))
    order = ", ".join(roles)
    fix = f"set {TEMPLATE_KEY} to a template that writes them"
    if "tool" in roles:
        fix += ", or have the environment give what tools return as messages of role user"
    elif "system" in roles:
        fix += ", or say it in a message of role user"
    elif len(roles) > 1:
        fix += ", or say it in one message"
    reason = f"it cannot write messages of these roles behind an answer: {order} ({'; '.join(said)})"
    return UserError(reason, key=TEMPLATE_KEY, fix=fix)
