"""Proof that conversations of several turns can be appended token by token under a model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from paddock.data.chat import Message
from paddock.data.dialogue import PROBE_TOOL, TEMPLATE_KEY, TOLD, Dialogue, Tools, text_of
from paddock.errors import UserError

FORMAT_KEY = "actor_rollout_ref.rollout.multi_turn.format"
MODEL_KEY = "actor_rollout_ref.model.path"
TURNS = 4
SYSTEM, THOUGHT, ARGUMENT, OUTCOME = "~be kind~", "~let me think~", "~an argument~", "~a result~"
THINKING = f"<think>\n{THOUGHT}\n</think>\n\n"
STAYS = "history is never rendered anew here: it stays as it was sampled"
HIDDEN = "the template does not show tools to the model"
ASKED: list[Message] = [{"role": "user", "content": "~question~"}]
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {"x": ARGUMENT}}}
    ],
}
RESULT: Message = {"role": "tool", "name": "probe", "content": OUTCOME, "tool_call_id": "call00000"}


class CallFormat(Protocol):
    """Is a format of tool calls: a name, and what reads calls in a text."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str) -> tuple[Sequence[Any], Sequence[Any]]: ...


@dataclass
class Proof:
    """Holds what is known about a chat template."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of a part of the template and what is known about it, in the order in which people read them."""
    problems: list[UserError] = field(default_factory=list)
    """Reasons to refuse a run of several turns, each with the key that settles it."""
    notes: list[str] = field(default_factory=list)
    """What a user may want to know."""
    marks: list[int] = field(default_factory=list)
    """Tokens of their own that calls are written with, such as <tool_call>."""


def require_proof(
    dialogue: Dialogue, form: CallFormat | None = None, tools: Tools | None = None, prompt: Sequence[Message] = ()
) -> Proof:
    """Returns the proof for a run of several turns; a UserError has the first reason to refuse it."""
    proof = prove(dialogue, form, tools, prompt)
    if proof.problems:
        raise proof.problems[0]
    return proof


def prove(
    dialogue: Dialogue, form: CallFormat | None = None, tools: Tools | None = None, prompt: Sequence[Message] = ()
) -> Proof:
    """Looks at how a chat template writes conversations of several turns.

    `form` reads tool calls. `tools` are those of the run: with them, what keeps tools from being used is a problem. A
    `prompt` that shows calls in the format may do so in another than the template's.
    """
    reason = "the tokenizer has no chat template, so no message can follow an answer"
    fix = "use an instruct model, or set one; plain texts need none"
    if dialogue.template is not None:
        try:
            probe = TemplateProbe(dialogue, form, tools, prompt)
        except UserError as error:
            reason, fix = error.reason, "set a template that writes a question"
        else:
            for part in (probe.prefixes, probe.ends, probe.thinking, probe.tools_shown, probe.calls, probe.equality):
                part()
            return probe.proof
    return Proof(problems=[UserError(reason, key=TEMPLATE_KEY, fix=fix)])


class TemplateProbe:
    """Renders conversations by a chat template, one method for each of its parts, and writes what they show into a
    `Proof`."""

    def __init__(self, dialogue: Dialogue, form: CallFormat | None, tools: Tools | None, prompt: Sequence[Message]):
        self.dialogue, self.form, self.tools, self.prompt, self.proof = dialogue, form, tools, prompt, Proof()
        self.base: Tools | None = None
        """Tools without which the template refuses everything."""
        try:
            self.text(ASKED)
        except UserError:
            self.base = [PROBE_TOOL]
            self.text(ASKED)
            self.note("the template refuses conversations without tools")
        whole, before = self.tokens(self.text(ASKED)), self.tokens(self.finished(ASKED, self.base))
        self.opened = dialogue.text(whole[len(common(whole, before)) :])
        """The generation prompt."""

    def row(self, part: str, text: str) -> None:
        self.proof.rows.append((part, text))

    def note(self, text: str) -> None:
        if text not in self.proof.notes:
            self.proof.notes.append(text)

    def refuse(self, reason: str, key: str, fix: str) -> None:
        self.proof.problems.append(UserError(reason, key=key, fix=fix))

    def hinder_tools(self, reason: str, key: str, fix: str) -> None:
        """Writes down what keeps tools from being used."""
        self.row("tools", f"cannot be used: {reason}")
        if self.tools:
            self.refuse(reason, key, fix)
        else:
            self.note(f"tools cannot be used: {reason}; to use them, {fix}")

    def prefixes(self) -> None:
        """Renders conversations of 1 to 4 turns, each of which should begin with the one before."""
        series: list[tuple[str, list[Message], str, Tools | None]] = [
            ("prefix, plain", [], "", self.base),
            ("prefix, system", [{"role": "system", "content": SYSTEM}], "", self.base),
            ("prefix, thinking", [], THINKING, self.base),
            ("prefix, tools", [], "", [PROBE_TOOL]),
        ]
        for what, opening, thought, tools in series:
            whole = [*opening, *conversation(TURNS + 1, thought)]
            ends = [len(opening) + 2 * turn for turn in range(1, TURNS + 1)]
            try:
                prompts = [self.text(whole[: end - 1], tools) for end in ends]
                finished = [self.finished(whole[:end], tools) for end in ends]
            except UserError as error:
                self.row(what, f"refused: {error.reason}")
                continue
            pairs = [*pairwise(prompts), *pairwise(finished)]
            changes = dict.fromkeys(changed(*pair) for pair in pairs if not self.begins(*pair))
            self.row(what, f"rewritten: {'; '.join(changes)}" if changes else f"stable over {TURNS} turns")
            for change in changes:
                self.note(f"rendered anew, {change}; {STAYS}")
        if "strftime_now" in str(self.dialogue.template):
            self.note(f"the template writes the date of the day into prompts; {STAYS}")

    def ends(self) -> None:
        """Compares what the template ends turns with to the tokens at which the model stops."""
        dialogue, behind = self.dialogue, {}
        for following, messages in (("a question", ASKED), ("a tool result", [RESULT])):
            try:
                behind[following] = dialogue.extension(messages, [], self.base)
            except UserError as error:
                if following == "a question":
                    self.refuse(error.reason, error.key or TEMPLATE_KEY, error.fix or f"set {TEMPLATE_KEY}")
        behind["nothing"] = dialogue.closing
        firsts = {name: tokens[0] for name, tokens in behind.items() if tokens and dialogue.is_special(tokens[0])}
        for token in dict.fromkeys(firsts.values()):
            before = " or ".join(name for name, first in firsts.items() if first == token)
            self.row("end of turn", f"{self.named([token])}, before {before}")
        if firsts:
            shared = common(behind.get("a question", []), dialogue.closing)[1:]
            self.row("separator", self.named(shared) if shared else "none")
        else:
            self.row("end of turn", "none: what the model stops at stays where it was drawn")
        self.row("stop tokens", ", ".join(self.named([stop]) for stop in sorted(dialogue.stops)))
        if firsts and not any(dialogue.ends_alike(stop, first) for stop in dialogue.stops for first in firsts.values()):
            ends = ", ".join(self.named([token]) for token in dict.fromkeys(firsts.values()))
            reason = f"the model does not stop at the end of its turn, {ends}, but at "
            reason += ", ".join(self.named([stop]) for stop in sorted(dialogue.stops))
            self.refuse(reason, MODEL_KEY, 'add it to "eos_token_id" in the model\'s generation_config.json')

    def thinking(self) -> None:
        """Says what the generation prompt opens, and what becomes of thinking."""
        opened = self.opened
        self.row("generation prompt", f"{opened!r} ({', '.join(map(str, self.tokens(opened)))})" if opened else "none")
        if "think" in opened:
            self.row("thinking", "the generation prompt opens it" if "</" not in opened else "switched off")
        try:
            kept = THOUGHT in self.text(conversation(2, THINKING))
        except UserError as error:
            self.row("thinking", f"refused: {error.reason}")
            return
        self.row("earlier thinking", f"the template {'keeps it' if kept else 'takes it out'}; here it stays as sampled")

    def tools_shown(self) -> None:
        """Checks that the model is told of its tools."""
        places = (ASKED, [{"role": "system", "content": SYSTEM}, *ASKED])
        shown = []
        for messages in places:
            try:
                shown.append(TOLD in self.text(messages, [PROBE_TOOL]))
            except UserError:
                shown.append(False)
        if shown == [False, True]:
            self.note("the template shows tools in a system message of the prompt, and nowhere without one")
        if not any(shown):
            self.note(f"{HIDDEN}: the prompt has to describe them, and how they are called; or set {TEMPLATE_KEY}")

    def calls(self) -> None:
        """Shows a call and a result as the template writes them, and reads the call."""
        dialogue, known = self.dialogue, [PROBE_TOOL]
        name = self.form.name if self.form else "unknown"
        self.row("format of calls", name)
        try:
            result = dialogue.text(dialogue.extension([RESULT], [], known))
        except UserError as error:
            self.hinder_tools(error.reason, error.key or TEMPLATE_KEY, error.fix or f"set {TEMPLATE_KEY}")
            return
        try:
            tokens = dialogue.spans([*ASKED, CALL], known)[1][0][:-1]
        except UserError:
            tokens = []
        written = dialogue.text(tokens)
        if ARGUMENT not in written:
            self.row("a call", "the template writes none")
            self.note(f"the template writes no calls; they are read in the format {name}")
        else:
            self.row("a call", repr(written))
            added = dialogue.tokenizer.added_tokens_decoder
            self.proof.marks = [token for token in dict.fromkeys(tokens) if token in added]
            if self.form and not self.reads(written):
                self.proof.marks = []
                reason = f"the format {name} does not read a call as the template writes it: {written!r}"
                if self.shown():
                    self.note(f"{reason}; the prompt shows calls as they are read")
                else:
                    fix = "name the format of the model's family, or show calls in this one in turns of the prompt"
                    self.hinder_tools(reason, FORMAT_KEY, fix)
        self.row("a tool result", repr(result))

    def shown(self) -> bool:
        """True if turns of the assistant in the prompt have calls that the format reads."""
        assert self.form
        turns = [text_of(message.get("content")) for message in self.prompt if message.get("role") == "assistant"]
        return any(self.form.parse(turn)[0] for turn in turns)

    def reads(self, text: str) -> bool:
        assert self.form
        calls, malformed = self.form.parse(text)
        return (
            len(calls) == 1 and not malformed and calls[0].name == "probe" and ARGUMENT in calls[0].arguments.values()
        )

    def equality(self) -> None:
        """Compares prompt, answers and extensions with the whole as the template writes it."""
        several: dict[str, tuple[list[Message], Tools | None]] = {"questions": (conversation(3), self.base)}
        rows = dict(self.proof.rows)
        if "a tool result" in rows:
            turn = CALL if ARGUMENT in rows["a call"] else {"role": "assistant", "content": ARGUMENT}
            several["tool results"] = ([*ASKED, turn, RESULT, turn, RESULT], [PROBE_TOOL])
        for name, (messages, tools) in several.items():
            try:
                self.compare(name, messages, tools)
            except UserError as error:
                self.row(f"equality, {name}", f"refused: {error.reason}")

    def compare(self, name: str, messages: list[Message], tools: Tools | None) -> None:
        dialogue = self.dialogue
        last: Message = {"role": "assistant", "content": "a"}
        spans = dialogue.spans([*messages, last], tools)[:-1]
        ours, theirs = [token for tokens, _ in spans for token in tokens], dialogue.prompt(messages, tools)
        behind = spans[-1][0]
        what = f"equality, {name}"
        if ours == theirs:
            self.row(what, f"prompt, answers and extensions are the template's own {len(ours)} tokens")
            return
        change = changed(dialogue.text(ours), dialogue.text(theirs))
        if theirs[-len(behind) :] == behind:
            self.row(what, f"equal behind answers; before them {change}")
        elif name == "questions":
            self.row(what, f"differs: {change}")
            reason = f"what it writes behind an answer depends on the conversation before it: {change}"
            self.refuse(reason, TEMPLATE_KEY, "set a template that writes each message by itself")
        else:
            self.row(what, f"differs: {change}")
            self.note(f"later {name} are written as the first ones; rendered anew, {change}")

    def finished(self, messages: list[Message], tools: Tools | None) -> str:
        return self.dialogue.without_generation_prompt(messages, tools)

    def text(self, messages: list[Message], tools: Tools | None = None) -> str:
        return self.dialogue.text(self.dialogue.prompt(messages, tools or self.base))

    def tokens(self, text: str) -> list[int]:
        return list(self.dialogue.tokenizer(text, add_special_tokens=False)["input_ids"])

    def begins(self, before: str, after: str) -> bool:
        """True if the tokens of `after` begin with those of `before`."""
        tokens = self.tokens(before)
        return self.tokens(after)[: len(tokens)] == tokens

    def named(self, tokens: Sequence[int]) -> str:
        """Returns tokens as text and ids."""
        return f"{self.dialogue.text(tokens)!r} ({', '.join(map(str, tokens))})"


def untrained_marks(marks: Sequence[str]) -> str:
    """Returns the warning that calls are written with tokens that the model was never trained on."""
    several = len(marks) > 1
    return (
        f"calls are written with {' and '.join(marks)}, {'tokens' if several else 'a token'} that the model was never "
        f"trained on: {'their rows' if several else 'its row'} of the head cannot be told from those of unused tokens, "
        "so samples miss them even after a warm start. Show calls in plain text in turns of the prompt "
        f"({FORMAT_KEY}=mistral), as `paddock data gsm8k_calculator` does, or start from a model that knows them"
    )


def conversation(turns: int, thought: str = "") -> list[Message]:
    """Returns a conversation that ends with its last question."""
    turn: list[Message] = [*ASKED, {"role": "assistant", "content": f"{thought}~answer~"}]
    return [*turn * (turns - 1), *ASKED]


def common(one: Any, other: Any) -> Any:
    """Returns what two texts, or two lists of tokens, begin with."""
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def changed(before: str, after: str) -> str:
    """Says which part of a text is other in the text that should begin with it."""
    at = len(common(before, after))
    if at == len(before):
        return "the tokens at a seam are others, for the same text"
    if TOLD in before and before.find(TOLD) != after.find(TOLD):
        return "the tools move to the last question"
    if SYSTEM in before and before.find(SYSTEM) != after.find(SYSTEM):
        return "the system message moves to the last question"
    if before.count(THOUGHT) > after[: len(before)].count(THOUGHT):
        return "earlier thinking is taken out"
    start = max(0, at - 12)
    if "think>" in before[start : at + 8]:
        return "the opening of thinking is taken out"
    return f"{before[start : at + 24]!r} becomes {after[start : at + 24]!r}"
