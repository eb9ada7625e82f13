"""Episodes with holes: a tool wrote in the middle of one, at the end of another, and a third was cut at a limit."""

from __future__ import annotations

from tiny_models import EOS, PAD, byte_tokenizer

from paddock.core.batch import Batch
from paddock.data.dataset import PromptRow
from paddock.data.loader import prompt_batch
from paddock.engines.rollout.base import Prompt
from paddock.rollouts.batch import with_responses
from paddock.rollouts.episode import Episode, Span

TOKENIZER = byte_tokenizer()
QUESTION = [{"role": "user", "content": "2+2?"}]


def tokens(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def wrote(text: str, version: int, end: bool = False, reward: float = 0.0) -> Span:
    """The policy's; each log-prob is minus the token's number in the span, from 1."""
    ids = tokens(text) + [EOS] * end
    return Span(ids, [-float(number + 1) for number in range(len(ids))], version, reward)


def tool(text: str) -> Span:
    return Span(tokens(text))


def episodes(**extras: object) -> list[Episode]:
    """Rows 10 to 13, of groups 5 and 6: 7 tokens of which 5 are the policy's, 2, 5 that were cut, and none."""
    prompts = [Prompt(tokens("2+2="), [10, 11]), Prompt(tokens("1+1="), [12, 13])]
    middle = [wrote("ab", 3, reward=0.5), tool("#4"), wrote("c4", 4, end=True)]
    return [
        Episode(10, 5, prompts[0], middle, True, extras=extras),
        Episode(11, 5, prompts[0], [wrote("de", 3), tool("#57")], True),
        Episode(12, 6, prompts[1], [wrote("fg", 3), wrote("hij", 4, reward=-1.0)], False),
        Episode(13, 6, prompts[1], [tool("#9")], False),
    ]


def holes(source: str = "mine", truth: str = "4", style: str = "rule", **extras: object) -> Batch:
    rows = [
        PromptRow(group, group, tokens(text), QUESTION, source, truth, {}, f"file row {group}", style)
        for group, text in ((5, "2+2="), (6, "1+1="))
    ]
    return with_responses(prompt_batch(rows, 2, PAD), episodes(**extras), PAD)
