"""No token drifts: what trains is what was drawn, in the chat templates of fifteen families."""

from __future__ import annotations

import pytest

from benchmarks import drift
from paddock.data.dialogue import Dialogue
from tests.templates.families import FAMILIES


def total_of(conversations: int) -> drift.Counts:
    total = drift.Counts()
    for family in FAMILIES.values():
        total.add(drift.measure(family, conversations // len(FAMILIES) + 1))
    return total


def holds(total: drift.Counts) -> None:
    assert total.drifted == 0
    assert total.structure == 0
    assert total.cut > total.conversations / 4 and total.turns > 6 * total.conversations
    assert total.changed > total.again / 2  # what is rendered again is another conversation, mostly


def test_no_token_drifts_and_what_stands_between_turns_is_the_templates():
    holds(total_of(200))


@pytest.mark.slow
def test_no_token_drifts_in_ten_thousand_conversations():
    holds(total_of(10_000))


@pytest.mark.parametrize(
    "broken",
    [
        lambda tokens: [token for token in tokens if token != 198],  # the line break behind the end of a turn is lost
        lambda tokens: tokens[:-3],  # the generation prompt is not whole
        lambda tokens: tokens * 2,  # what was said is there twice
    ],
    ids=["separator", "generation prompt", "twice"],
)
def test_the_measure_sees_an_extension_that_is_wrong(broken, monkeypatch):
    real = Dialogue.extension

    def extension(self, said, answer, tools=None, plain=False):
        return broken(real(self, said, answer, tools, plain))

    monkeypatch.setattr(Dialogue, "extension", extension)
    counts = drift.measure(FAMILIES["qwen25"], 4)
    assert counts.structure > 0.9 * (counts.turns - counts.conversations)


def test_the_measure_sees_a_token_that_was_not_drawn(monkeypatch):
    def changed(batch, episodes, pad, real=drift.with_responses):
        found = real(batch, episodes, pad)
        found.responses[0, 0] += 1
        return found

    monkeypatch.setattr(drift, "with_responses", changed)
    assert drift.measure(FAMILIES["qwen25"], 4).drifted > 0
