"""Spans and episodes are plain values, and say what makes no sense."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from holes import episodes, tool, wrote
from tiny_models import one_turn_each

from paddock.core.images import Images
from paddock.engines.rollout.base import Chosen, Completion, Prompt
from paddock.rollouts.episode import Span


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        ({"tokens": [7], "log_probs": [-1.0]}, "log-probs and a version"),
        ({"tokens": [7], "version": 0}, "log-probs and a version"),
        ({"tokens": [7, 8], "log_probs": [-1.0], "version": 0}, "2 tokens and 1 log-probs"),
        ({"tokens": [7], "reward": 1.0}, "paid for tokens of the policy"),
        ({"tokens": [], "log_probs": [], "version": 2, "reward": 1.0}, "paid for tokens of the policy"),
    ],
)
def test_a_span_that_makes_no_sense_is_refused(span, reason):
    with pytest.raises(ValueError, match=reason):
        Span(**span)


def test_a_response_ends_with_the_last_token_of_the_policy():
    middle, end, cut, nothing = episodes()
    assert middle.response == middle.spans and cut.response == cut.spans
    assert end.response == end.spans[:1] and nothing.response == []
    empty = replace(end, spans=[*end.spans, wrote("", 4)])
    assert empty.response == end.spans[:1]


def test_episodes_survive_a_pickle_and_are_compared_by_value():
    seen = Images(*(torch.arange(3.0) for _ in range(4)), offset=-2)
    experts = Chosen(torch.ones(4, 2, 2), torch.zeros(3, 2, 2))
    whole = replace(episodes(turns=2)[0], experts=experts, prompt=Prompt([1], [10], seen))
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert whole != replace(whole, experts=Chosen(torch.ones(4, 2, 2), torch.ones(3, 2, 2)))
    assert whole != replace(whole, prompt=Prompt([1], [10], replace(seen, offset=-1)))
    assert whole != replace(whole, spans=[*whole.spans, tool("#")]) != replace(whole, done=False)


def test_completions_become_episodes_of_one_span_in_the_order_of_the_prompts():
    prompts = [Prompt([1, 2], [4, 5]), Prompt([3], [6])]
    drawn = [Completion(4, [7], [-0.5], True), Completion(5, [], [], False), Completion(6, [8, 9], [-1.0, -2.0], False)]
    found = one_turn_each(drawn, prompts, [2, 3], version=6)
    assert [(one.id, one.group, one.prompt, one.done) for one in found] == [
        (4, 2, prompts[0], True), (5, 2, prompts[0], False), (6, 3, prompts[1], False)
    ]  # fmt: skip
    assert [one.spans for one in found] == [[Span([7], [-0.5], 6)], [Span([], [], 6)], [Span([8, 9], [-1.0, -2.0], 6)]]
