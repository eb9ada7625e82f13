"""Episodes with holes: a tool wrote in the middle of one, at the end of another, and a third was cut at a limit."""

from __future__ import annotations

from collections.abc import Sequence

from tiny_models import EOS, PAD, byte_tokenizer

from paddock.core.batch import Batch
from paddock.data.dataset import PromptRow
from paddock.data.loader import prompt_batch
from paddock.engines.rollout.base import Prompt
from paddock.rewards.scoring import Scoring
from paddock.rollouts.batch import with_responses
from paddock.rollouts.collect import Drawn
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


def asked(source: str = "mine", truth: str = "4", style: str = "rule") -> list[PromptRow]:
    return [
        PromptRow(group, group, tokens(text), QUESTION, source, truth, {}, f"file row {group}", style)
        for group, text in ((5, "2+2="), (6, "1+1="))
    ]


def episodes(rows: Sequence[PromptRow] = (), **extras: object) -> list[Episode]:
    """Rows 10 to 13, of groups 5 and 6: 7 tokens of which 5 are the policy's, 2, 5 that were cut, and none."""
    first, second = rows or asked()
    prompts = [Prompt(first.tokens, [10, 11]), Prompt(second.tokens, [12, 13])]
    middle = [wrote("ab", 3, reward=0.5), tool("#4"), wrote("c4", 4, end=True)]
    return [
        Episode(10, first, prompts[0], middle, True, extras=extras),
        Episode(11, first, prompts[0], [wrote("de", 3), tool("#57")], True),
        Episode(12, second, prompts[1], [wrote("fg", 3), wrote("hij", 4, reward=-1.0)], False),
        Episode(13, second, prompts[1], [tool("#9")], False),
    ]


def holes(source: str = "mine", truth: str = "4", style: str = "rule", **extras: object) -> Batch:
    return batch_of(episodes(asked(source, truth, style), **extras))


def batch_of(found: list[Episode]) -> Batch:
    return with_responses(prompt_batch([found[0].row, found[-1].row], 2, PAD), found, PAD)


def drawn(scoring: Scoring, found: list[Episode]) -> Drawn:
    """Returns these episodes of which none is scored yet."""
    return Drawn(batch_of(found), scoring, dict(enumerate(found)))
