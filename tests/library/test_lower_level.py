"""Batches of a program's own: advantages that no estimator made, and rows that older weights drew."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import paddock


@pytest.fixture
def run(tmp_path):
    """A mini-batch is half a batch: `advantages` computes log-probs by the current weights."""
    with paddock.Run(
        batch=8, mini_batch=4, n=4, steps=4, lr=2e-3, validate_first=False, folder=str(tmp_path / "run"),
        logger=["file"], config={"trainer.test_freq": -1, "trainer.save_last": False},
    ) as found:  # fmt: skip
        yield found


def test_a_batch_with_advantages_of_its_own_is_learnt_and_one_without_is_refused(run):
    batch = run.score(run.sample())
    with pytest.raises(paddock.UserError, match="the batch has no advantages"):
        run.learn(batch)
    metrics = run.learn(batch.with_(advantages=batch.mask.float()))
    assert metrics["critic/advantages/mean"] == metrics["critic/returns/mean"] == 1
    assert metrics["critic/rewards/mean"] == metrics["critic/score/mean"]


def test_an_episode_has_the_row_that_it_answers(run):
    found = run.sample([{"prompt": "1+1=", "answer": "2"}, {"prompt": "3+4=", "answer": "7"}], n=2)
    assert [one.row.ground_truth for one in found] == ["2", "2", "7", "7"]
    assert [one.id - 2 * one.group for one in found] == [0, 1, 0, 1] and found[1].group < found[2].group
    assert found[2].prompt.tokens == found[2].row.tokens
    some = run.sample()[3:6]
    batch = run.score(some)
    assert batch.row.tolist() == [one.id for one in some] and batch.group.tolist() == [one.group for one in some]
    assert list(batch.extras["ground_truth"]) == [one.row.ground_truth for one in some]


def test_rows_that_older_weights_drew_are_learnt_with_their_ratios(run):
    batch = run.advantages(run.score(run.sample())).rows(slice(0, 16))  # one mini-batch, hence one optimizer step
    assert run.learn(batch)["actor/ppo_kl"] == 0
    now = run.advantages(batch).need("old_log_probs")
    mask = batch.mask != 0
    log_ratios = (now - batch.old_log_probs)[mask]
    assert log_ratios.abs().max() > 0.01
    again = run.learn(batch)
    assert again["actor/ppo_kl"] == pytest.approx(float(-log_ratios.mean()), rel=1e-3, abs=1e-5)
    ratios, advantages = log_ratios.exp(), batch.advantages[mask]
    clipped = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.2))
    clipped = torch.where(advantages < 0, torch.minimum(clipped, -3 * advantages), clipped)
    assert again["actor/pg_loss"] == pytest.approx(float(clipped.mean()), abs=1e-4)


@pytest.mark.parametrize(("mini_batch", "more"), [(8, 7), (4, 0)])
def test_a_demonstration_keeps_the_log_probs_of_its_writer(tmp_path, mini_batch, more):
    """Hand-computed: the writer gave each of three tokens 1/2, the policy what the sampled answer says."""
    with paddock.Run(
        batch=8, mini_batch=mini_batch, n=2, steps=2, lr=1e-6, validate_first=False, folder=str(tmp_path / "run"),
        logger=["file"], config={"trainer.test_freq": -1, "trainer.save_last": False},
    ) as run:  # fmt: skip
        episodes = run.sample()
        found = next(index for index, one in enumerate(episodes) if len(one.spans[0].tokens) >= 3)
        sampled = episodes[found].spans[0]
        tokens, policy = sampled.tokens[:3], sampled.log_probs[:3]
        span = paddock.Span(tokens, [math.log(0.5)] * 3, version=sampled.version + more)
        episodes[found] = replace(episodes[found], spans=[span])
        batch = run.advantages(run.score(episodes))
        assert batch.old_log_probs[found, :3].tolist() == pytest.approx([math.log(0.5)] * 3)
        others = [index for index in range(len(batch)) if index != found]
        mask = batch.mask[others] != 0
        torch.testing.assert_close(
            batch.old_log_probs[others][mask], batch.rollout_log_probs[others][mask], atol=1e-4, rtol=0
        )
        assert set(batch.versions[found, :3].tolist()) == {-2} and (batch.mask[found, :3] == 1).all()
        only = batch.rows(slice(found, found + 1))
        only = only.with_(advantages=torch.ones_like(only.mask).float())
        metrics = run.learn(only)
        ratios = [math.exp(own - math.log(0.5)) for own in policy]
        clipped = [max(-ratio, -min(max(ratio, 0.8), 1.2)) for ratio in ratios]
        assert metrics["actor/pg_loss"] == pytest.approx(sum(clipped) / 3, abs=1e-3)
        assert metrics["actor/ppo_kl"] == pytest.approx(sum(math.log(0.5) - own for own in policy) / 3, abs=1e-3)


def test_a_finished_run_that_was_closed_opens_again_at_its_last_step_and_the_same_lines_begin_anew(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)

    def made() -> paddock.Run:
        config = {"trainer.test_freq": -1}
        return paddock.Run(batch=2, n=2, steps=1, validate_first=False, logger=["file"], config=config)

    run = made()
    assert run.train().finished
    folder = run.folder
    assert run.train().trained == 0
    told = f"nothing was trained: {folder} holds all 1 steps. To train on: Run(..., folder={str(folder)!r}, steps=2)"
    assert told in caplog.text
    run.close()
    assert run.save() == paddock.Checkpoint(1, folder / "global_step_1") and run.folder == folder
    run.close()
    other = made()
    assert other.train().trained == 1 and str(other.folder) == f"{folder}-2"
    other.close()
