"""The columns that episodes with holes become, worked by hand, and where they travel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from holes import episodes, holes, tokens
from tiny_models import EOS, PAD, one_turn_each

from paddock.core.batch import NOBODY, Batch
from paddock.engines.rollout.base import Chosen, Completion, Prompt
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rollouts.batch import with_responses
from paddock.workers.sharded import share_of
from paddock.workers.transport import from_arrays, to_arrays
from paddock.workers.updates import plan_update

P = PAD


def test_every_column_of_a_batch_with_holes():
    batch = holes()
    a, b, tool, four, c, d, e = tokens("ab#4cde")
    assert batch.responses.tolist() == [
        [a, b, tool, four, c, four, EOS], [d, e, P, P, P, P, P], [*tokens("fghij"), P, P], [P] * 7
    ]  # fmt: skip
    assert batch.lengths.tolist() == [7, 2, 5, 0]
    assert batch.mask.tolist() == [
        [1, 1, 0, 0, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [0] * 7
    ]  # fmt: skip
    assert batch.versions.tolist() == [
        [3, 3, -1, -1, 4, 4, 4], [3, 3, -1, -1, -1, -1, -1], [3, 3, 4, 4, 4, -1, -1], [-1] * 7
    ]  # fmt: skip
    assert batch.rollout_log_probs.tolist() == [
        [-1, -2, 0, 0, -1, -2, -3], [-1, -2, 0, 0, 0, 0, 0], [-1, -2, -1, -2, -3, 0, 0], [0] * 7
    ]  # fmt: skip
    assert batch.environment_rewards.tolist() == [[0, 0.5, *[0] * 5], [0] * 7, [0, 0, 0, 0, -1, 0, 0], [0] * 7]
    assert batch.done.tolist() == [True, True, False, False]


def test_turns_are_what_the_policy_wrote_between_environments():
    batch = holes()
    assert batch.turns() == [[tokens("ab"), [*tokens("c4"), EOS]], [tokens("de")], [tokens("fghij")], []]
    assert batch.turn_counts().tolist() == [2, 1, 1, 0]
    assert batch.policy_lengths().tolist() == [5, 2, 5, 0]
    rejected = batch.with_(mask=torch.zeros_like(batch.mask))
    assert rejected.turn_counts().tolist() == [2, 1, 1, 0], "a correction that rejects tokens changes no turns"


def test_one_span_gives_the_columns_of_a_plain_loop():
    prompts = [Prompt([1], [0, 1]), Prompt([2], [2])]
    drawn = [Completion(0, [7, 8], [-0.3, -0.7], True), Completion(1, [], [], False), Completion(2, [9], [-0.1], False)]
    rows = Batch(torch.arange(3), torch.tensor([0, 0, 1]), torch.tensor([[1], [1], [2]]), extras={"kept": [1, 2, 3]})
    batch = with_responses(rows, one_turn_each(drawn, prompts, [0, 1], version=0), pad=5)
    assert batch.responses.tolist() == [[7, 8], [5, 5], [9, 5]] and batch.responses.dtype == torch.int64
    assert batch.mask.tolist() == [[1, 1], [0, 0], [1, 0]] and batch.mask.dtype == torch.int64
    assert torch.equal(batch.rollout_log_probs, torch.tensor([[-0.3, -0.7], [0, 0], [-0.1, 0]]))
    assert batch.versions.tolist() == [[0, 0], [-1, -1], [0, -1]] and batch.lengths.tolist() == [2, 0, 1]
    assert batch.extras == {"kept": [1, 2, 3]} and batch.environment_rewards is None and batch.response_experts is None


def test_rows_that_were_not_asked_for_are_refused():
    with pytest.raises(ValueError, match="other rows than were asked for, or in another order"):
        with_responses(holes(), episodes()[::-1], PAD)


def test_batches_of_other_widths_and_extras_are_joined_and_padding_has_no_version():
    whole, short = holes(turns=2), holes().rows(torch.tensor([1, 3]))
    columns = {name: column[:, :2] for name, column in short.columns().items() if column.shape[1:] == (7,)}
    joined = Batch.concat([whole, short.with_(**columns)])
    assert joined.versions[4].tolist() == [3, 3, -1, -1, -1, -1, -1] and joined.done.tolist()[4:] == [True, False]
    assert joined.turn_counts().tolist() == [2, 1, 1, 0, 1, 0] and joined.policy_lengths().tolist()[4:] == [2, 0]
    assert joined.extras["turns"] == [2, None, None, None, None, None]


def test_versions_travel_to_the_ranks_that_train():
    batch = holes()
    keys = load(["trainer.device=cpu"]).config.actor_rollout_ref.actor
    plan = plan_update(keys, 1, batch, step=1)
    rows, _ = share_of(batch, plan, [torch.tensor([2, 0]) for _ in plan.minis])
    sent = {name: to_arrays(batch.columns()[name][rows.positions]) for name in rows.columns & batch.columns().keys()}
    arrived = Batch(**{name: from_arrays(array) for name, array in sent.items()})
    assert torch.equal(arrived.versions, batch.versions[[0, 2]]) and arrived.turn_counts().tolist() == [2, 1]


def test_recorded_experts_with_several_turns_are_refused_by_name():
    def recorded(episode):
        length = sum(len(span.tokens) for span in episode.response)
        return replace(episode, experts=Chosen(torch.ones(4, 2, 2), torch.ones(length, 2, 2)))

    batch, known = holes(), [recorded(one) for one in episodes()]
    with pytest.raises(UserError, match=r"enable_rollout_routing_replay=True: .* row 10 has 2 turns(.|\n)*mode=R2"):
        with_responses(batch, known, PAD)
    rest = with_responses(batch.rows(torch.tensor([1, 2])), known[1:3], PAD)
    assert rest.response_experts.shape == (2, 5, 2, 2) and rest.response_experts[0, 2:].sum() == 0
    assert rest.prompt_experts.shape == (2, 4, 2, 2) and NOBODY not in rest.versions[1]
