"""Drifted tokens: what trains against what was drawn, over random conversations in the chat templates of many families.

    python -m benchmarks.drift --conversations 10000

Answers are random: texts as the tokenizer writes them, the same texts in other tokens, and tokens that are no text; a
stop token ends them, or they are cut. What a rollout appends is compared with what the template writes for the whole
conversation, and the tokens in the columns of a batch with those that were drawn. Beside it stands what would have
changed had the conversation been decoded, rendered by the template and encoded again.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import torch

from paddock.core.batch import Batch
from paddock.data.dialogue import Dialogue
from paddock.engines.rollout.base import Prompt
from paddock.environments.calls import FORMATS
from paddock.environments.environment import Call
from paddock.rollouts.batch import with_responses
from paddock.rollouts.episode import Episode, Span
from tests.templates.families import FAMILIES, Family

TURNS = 16
PIECES = (
    "The answer is 12", "345", " 6789", "Grüße", "世界", "🙂🚀", "приве́т", '{"a": [1, 2]}', "\n", "\n\n", "  ",
    "x = 1\n\ty", "naïve café", "<b>", "0.5", "\r\n", "“quoted”", "e\u0301", "\u200d", "it's", "100000", "</s",
    "\\n", "'", "tool",
)  # fmt: skip
ODD = ("", " ", "\n", "</think>", "<think>a</think>b", '"', "\\", "{{ x }}", "\u00a0a\u00a0", "~answer~", "<b>" * 99,
       "<tool_response>a</tool_response>", "null", '{"content": 1}')  # fmt: skip
"""What an environment may say, and templates may trim, quote or look for."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Runs {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    for name in ("search", "compute")
]


COLUMNS = (
    "template", "conversations", "turns", "drawn tokens", "drifted tokens", "differs from the template",
    "rendered again: refused", "changed", "changed, of those the tokenizer writes so", "drawn tokens lost",
)  # fmt: skip


@dataclass
class Counts:
    """Counts what was drawn, and what became of it."""

    conversations: int = 0
    turns: int = 0
    cut: int = 0
    drawn: int = 0
    """Tokens."""
    drifted: int = 0
    """Tokens that would train and were not drawn, or were drawn and would not train."""
    structure: int = 0
    """Stretches between two turns that the template writes otherwise."""
    refused: int = 0
    """Conversations that the template refuses to render again."""
    again: int = 0
    """Conversations that were rendered again."""
    changed: int = 0
    """Those that became other ones."""
    natural: int = 0
    """Conversations that were rendered again, and whose answers are as the tokenizer writes them."""
    natural_changed: int = 0
    drawn_again: int = 0
    """Drawn tokens in conversations that were rendered again."""
    lost: int = 0
    """Those of them that are not there any more."""

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Talk:
    """Holds a conversation as a rollout builds it, and as messages beside that."""

    family: Family
    dialogue: Dialogue
    tools: list[dict[str, Any]] | None
    natural: bool
    messages: list[dict[str, Any]]
    """The conversation as it would be rendered again."""
    marked: list[dict[str, Any]]
    """The same with marks for answers."""
    prompt: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    structure: int = 0
    cut: int = 0


def text(rng: random.Random, pieces: int = 6) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, pieces)))


def answer_text(rng: random.Random, family: Family, calling: bool) -> tuple[str, list[Call], str]:
    """Returns what an answer says, the calls in it, and how they are written."""
    thought = f"<think>\n{text(rng)}\n</think>\n\n" if rng.random() < 0.3 else ""
    calls: list[Call] = []
    if calling and family.calls:
        calls = [Call(rng.choice(("search", "compute")), {"x": text(rng, 3)}, f"{rng.randrange(10**9):09d}")]
    written = FORMATS[family.calls].render(calls) if calls else ""
    return thought + text(rng).strip() + written, calls, written


def as_message(family: Family, said: str, calls: list[Call], written: str) -> dict[str, Any]:
    """Returns a decoded answer as the message that is rendered again, its calls apart if they can be told."""
    if not calls or not family.writes_calls or not said.endswith(written):
        return {"role": "assistant", "content": said}
    functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    tool_calls = [{"id": call.id, "type": "function", "function": function}
                  for call, function in zip(calls, functions, strict=True)]  # fmt: skip
    return {"role": "assistant", "content": said.removesuffix(written), "tool_calls": tool_calls}


def answer_tokens(rng: random.Random, talk: Talk, said: str) -> list[int]:
    """Returns tokens of a text: the tokenizer's own, or those of its parts, or with tokens that are no text."""
    dialogue = talk.dialogue
    if talk.natural:
        return dialogue.tokenizer(said, add_special_tokens=False)["input_ids"]
    cuts = sorted(rng.randrange(len(said) + 1) for _ in range(rng.randint(0, len(said))))
    parts = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True) if b > a]
    encoded = dialogue.tokenizer(parts, add_special_tokens=False)["input_ids"] if parts else []
    tokens = [token for part in encoded for token in part]
    if rng.random() < 0.4:
        at = rng.randrange(len(tokens) + 1)
        tokens[at:at] = [rng.randrange(500) for _ in range(rng.randint(1, 8))]  # bytes and merges, no special tokens
    return [token for token in tokens if token not in dialogue.stops]


def said_next(rng: random.Random, family: Family) -> list[dict[str, Any]]:
    """Returns what the environment says: a question, or results of tools."""

    def content() -> str:
        return rng.choice(ODD) if rng.random() < 0.2 else text(rng)

    if family.tool_role and rng.random() < 0.5:
        return [
            {"role": "tool", "name": "search", "content": content(), "tool_call_id": f"{rng.randrange(10**9):09d}"}
            for _ in range(rng.randint(1, 3))
        ]
    return [{"role": "user", "content": content()}]


def begin(rng: random.Random, family: Family, dialogue: Dialogue, natural: bool) -> Talk:
    messages = [{"role": "user", "content": text(rng)}]
    if family.system and rng.random() < 0.5:
        messages.insert(0, {"role": "system", "content": text(rng)})
    tools = TOOLS if family.calls and (family.name == "hermes" or rng.random() < 0.7) else None
    talk = Talk(family, dialogue, tools, natural, messages, list(messages))
    talk.prompt = dialogue.prompt(messages, tools)
    return talk


def grow(rng: random.Random, talk: Talk, turns: int) -> None:
    """Adds turns of the policy, and what the environment says between them, as a rollout does."""
    dialogue = talk.dialogue
    for turn in range(turns):
        said = said_next(rng, talk.family)
        calling = said[0]["role"] == "tool"
        whole = dialogue.extension(said, [], talk.tools)
        meant, calls, written = answer_text(rng, talk.family, calling)
        drawn = answer_tokens(rng, talk, meant)
        cut = not talk.natural and rng.random() < 0.2
        if not cut:
            end = whole[0] if whole[0] in dialogue.stops else dialogue.tokenizer.eos_token_id
            drawn.append(end if talk.natural or rng.random() < 0.8 else rng.choice(sorted(dialogue.stops)))
        drawn = drawn or [0]
        talk.cut += cut
        talk.spans.append(Span(drawn, [-1.0] * len(drawn), version=turn % 3))
        decoded = dialogue.text(drawn[:-1] if drawn[-1] in dialogue.stops else drawn)
        talk.messages.append(as_message(talk.family, decoded, calls, written))
        if turn == turns - 1:
            return
        between = dialogue.extension(said, drawn, talk.tools)
        talk.structure += not as_the_template_writes(talk, said, whole, between)
        talk.messages += said
        talk.spans.append(Span(between))


def as_the_template_writes(talk: Talk, said: list[dict[str, Any]], whole: list[int], between: list[int]) -> bool:
    """True if the conversation so far, rendered by the template as a whole with marks for answers, ends so."""
    name, dialogue = talk.family.name, talk.dialogue
    turn: dict[str, Any] = {"role": "assistant", "content": f"~mark {len(talk.marked)}~"}
    results = [message for message in said if message["role"] == "tool"]
    if results:
        single = name in ("llama31", "gpt_oss")
        turn["tool_calls"] = [
            {
                "id": message["tool_call_id"],
                "type": "function",
                "function": {"name": "search", "arguments": {"x": "~mark~"}},
            }
            for message in (results[:1] if single else results)
        ]
    talk.marked += [turn, *said]
    messages, tools = talk.marked, talk.tools
    if name == "mistral_nemo":  # repeats the system message and the tools at the last question
        messages, tools = [message for message in messages if message["role"] != "system"], None
    if name == "deepseek_r1":  # opens results once in a conversation
        messages = [{"role": "user", "content": "~first~"}, turn, *said]
    rendered = dialogue.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    return rendered.endswith(dialogue.text(whole)) and whole[len(whole) - len(between) :] == between


def rendered_again(talk: Talk) -> list[int] | None:
    """Returns the tokens of the conversation decoded, rendered and encoded again; None if the template refuses it."""
    tokenizer = talk.dialogue.tokenizer
    try:
        found = tokenizer.apply_chat_template(talk.messages, tools=talk.tools, tokenize=False)
    except Exception:
        return None
    return tokenizer(found, add_special_tokens=False)["input_ids"]


def lost_tokens(talk: Talk, again: list[int]) -> int:
    """Returns how many drawn tokens an alignment of the two conversations does not find."""
    ours, drawn = list(talk.prompt), [False] * len(talk.prompt)
    for span in talk.spans:
        ours += span.tokens
        drawn += [span.log_probs is not None] * len(span.tokens)
    start = next((at for at, (a, b) in enumerate(zip(ours, again, strict=False)) if a != b), min(len(ours), len(again)))
    blocks = SequenceMatcher(None, ours[start:], again[start:], autojunk=False).get_matching_blocks()
    found = {start + block.a + offset for block in blocks for offset in range(block.size)}
    return sum(drawn[at] and at >= start and at not in found for at in range(len(ours)))


def compare(talk: Talk, counts: Counts) -> None:
    """Counts what becomes of a conversation that is rendered again."""
    again = rendered_again(talk)
    if again is None:
        counts.refused += 1
        return
    lost = lost_tokens(talk, again)
    counts.again += 1
    counts.changed += lost > 0
    counts.natural += talk.natural
    counts.natural_changed += talk.natural and lost > 0
    counts.drawn_again += sum(len(span.tokens) for span in talk.spans if span.log_probs is not None)
    counts.lost += lost


def trained(talks: list[Talk], counts: Counts) -> None:
    """Builds the batch of a step of these conversations, and compares what would train with what was drawn."""
    width = max(len(talk.prompt) for talk in talks)
    prompts = torch.tensor([[0] * (width - len(talk.prompt)) + talk.prompt for talk in talks])
    rows = torch.arange(len(talks))
    episodes = [Episode(row, row, Prompt(talk.prompt, [row]), talk.spans, done=True) for row, talk in enumerate(talks)]
    batch = with_responses(Batch(row=rows, group=rows, prompts=prompts), episodes, pad=0)
    mask, responses = batch.need("mask").bool(), batch.need("responses")
    for row, talk in enumerate(talks):
        drawn = [token for span in talk.spans if span.log_probs is not None for token in span.tokens]
        context = [token for span in talk.spans for token in span.tokens]
        found = responses[row][mask[row]].tolist()
        counts.drawn += len(drawn)
        counts.drifted += sum(a != b for a, b in zip(drawn, found, strict=False)) + abs(len(drawn) - len(found))
        counts.drifted += responses[row, : len(context)].tolist() != context


def measure(family: Family, conversations: int, seed: int = 0, rows: int = 64) -> Counts:
    """Returns the counts of one family."""
    rng, counts, dialogue = random.Random(f"{family.name} {seed}"), Counts(), family.dialogue()
    talks: list[Talk] = []
    for number in range(conversations):
        talk = begin(rng, family, dialogue, natural=number % 3 == 0)
        grow(rng, talk, rng.randint(1, TURNS))
        talks.append(talk)
        counts.conversations += 1
        counts.turns += sum(span.log_probs is not None for span in talk.spans)
        counts.cut += talk.cut
        counts.structure += talk.structure
        compare(talk, counts)
        if len(talks) == rows or number == conversations - 1:
            trained(talks, counts)
            talks = []
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    total, start = Counts(), time.perf_counter()
    for number, family in enumerate(FAMILIES.values()):
        share = options.conversations // len(FAMILIES) + (number < options.conversations % len(FAMILIES))
        counts = measure(family, share, options.seed)
        total.add(counts)
        print(line(family.name, counts), flush=True)
    print(line("all", total))
    print(f"{total.cut} turns were cut; {time.perf_counter() - start:.0f} s")
    if total.drifted or total.structure:
        raise SystemExit("tokens drifted")


def line(name: str, counts: Counts) -> str:
    def share(part: int, whole: int) -> str:
        return f"{part / max(1, whole):.1%}"

    cells = [name, counts.conversations, counts.turns, counts.drawn, counts.drifted, counts.structure, counts.refused,
             share(counts.changed, counts.again), share(counts.natural_changed, counts.natural),
             share(counts.lost, counts.drawn_again)]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
