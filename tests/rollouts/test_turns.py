"""What reads responses over holes: metrics, penalties, texts, scorers, judges, estimators. Each serves or refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from holes import TOKENIZER, asked, drawn, episodes, holes

from paddock.algorithms.advantages import compute_advantages
from paddock.commands.generation import record_of
from paddock.config.schema import AlgorithmConfig
from paddock.core.batch import Batch
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rewards.manager import RewardManager
from paddock.rollouts.collect import Collector, Drawn
from paddock.runs.samples import samples_of
from paddock.trainer.assembly import open_rewards
from paddock.trainer.metrics import batch_metrics
from paddock.trainer.performance import token_counts
from paddock.trainer.reinforcement import train

BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"


def scored(batch: Batch) -> Batch:
    scores = torch.tensor([[0, 0, 0, 0, 0, 0, 1.0], [0, 2.0, *[0] * 5], [0, 0, 0, 0, 3.0, 0, 0], [0] * 7])
    return batch.with_(scores=scores, rewards=scores, advantages=scores, returns=scores)


def collector(rewards: RewardManager) -> Collector:
    """Has no loader and no engine: the batch is there."""
    return Collector(load([]).config, None, None, rewards, TOKENIZER, frozenset())  # type: ignore[arg-type]


def test_metrics_count_what_the_policy_wrote_and_which_rows_were_cut():
    batch = scored(holes())
    for mask in (batch.mask, torch.zeros_like(batch.mask)):  # also if a correction rejected every token
        found = batch_metrics(batch.with_(mask=mask), max_prompt=8, max_response=6, use_critic=False)
        assert (found["response_length/mean"], found["response_length/max"]) == (3.0, 5.0)
        assert found["response_length/min"] == 0.0 and found["response_length_non_aborted/min"] == 2.0
        assert found["response_length/clip_ratio"] == 1 / 4 and found["response/aborted_ratio"] == 1 / 4
        assert found["response_length_non_aborted/clip_ratio"] == 1 / 3
        assert found["response_length_with_environment/mean"] == 3.5
        assert found["response_length_with_environment/max"] == 7.0
        assert found["critic/score/mean"] == 2.0


def test_lengths_are_told_apart_only_where_an_environment_wrote():
    alone = scored(holes()).rows(torch.tensor([1, 2]))
    found = batch_metrics(alone, max_prompt=8, max_response=5, use_critic=False)
    assert not any("environment" in name for name in found) and found["response_length/clip_ratio"] == 0.5


def test_generated_tokens_are_the_policys():
    assert token_counts(holes()) == (12, 14 + 4 * 4)


def test_the_overlong_penalty_counts_what_the_policy_wrote():
    keys = [f"{BUFFER}.enable=True", f"{BUFFER}.len=4", f"{BUFFER}.penalty_factor=2", "data.max_response_length=7"]
    with open_rewards(load(keys).config) as rewards:
        batch, _ = rewards.fill(holes("paddock/addition", "none"), [""] * 4)
    assert batch.scores.sum(-1).tolist() == [-1.0, 0.0, -1.0, 0.0], "5, 2, 5 and 0 tokens; 3 cost nothing"
    assert batch.scores[0].tolist() == [0, 0, 0, 0, 0, 0, -1.0]


def test_samples_tell_the_policys_turns_from_a_tools_text():
    samples = samples_of(scored(holes()), TOKENIZER)
    assert [sample.answer for sample in samples] == ["ab#4c4", "de", "fghij", ""]
    assert [sample.length for sample in samples] == [5, 2, 5, 0]
    assert samples[0].extras["turns"] == ["ab", "c4"]
    assert not any("turns" in sample.extras for sample in samples[1:])


def test_a_record_of_generate_counts_what_the_policy_wrote():
    row = type("Row", (), {"extra_info": {"mark": 1}})()
    record = record_of(row, episodes(), TOKENIZER)
    assert record == {
        "mark": 1, "responses": ["ab#4c4", "de", "fghij", ""], "log_probs": [-9.0, -3.0, -9.0, 0],
        "lengths": [5, 2, 5, 0], "stopped": [True, True, False, False],
    }  # fmt: skip


def test_a_rule_reads_the_last_turn_and_an_environments_rewards_are_added():
    with open_rewards(load(["reward=contains", "reward_model.num_workers=1"]).config) as rewards:
        batch, _ = collector(rewards).score(drawn(rewards.begin(), episodes(asked(truth="b"))))
        assert batch.extras["contains"] == [0.0] * 4, "b is in the first turn"
        batch, _ = collector(rewards).score(drawn(rewards.begin(), episodes(asked(truth="c"))))
    assert batch.extras["contains"] == [1.0, 0.0, 0.0, 0.0] and batch.environment_rewards is None
    assert batch.scores.tolist() == [[0, 0.5, 0, 0, 0, 0, 1.0], [0] * 7, [0, 0, 0, 0, -1.0, 0, 0], [0] * 7]


def test_a_function_of_the_users_reads_the_whole_response(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 1.0, 'text': solution_str}\n"
    )
    keys = [f"custom_reward_function.path={tmp_path}/mine.py", "reward_model.num_workers=1"]
    with open_rewards(load(keys).config) as rewards:
        batch, _ = collector(rewards).score(drawn(rewards.begin(), episodes()))
    assert batch.extras["text"] == ["ab#4c4", "de", "fghij", ""]


def test_a_function_of_whole_batches_gets_the_messages_of_each_conversation(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def reward(completions, **columns): return [float(len(turns)) for turns in completions]\n"
    )
    keys = [f"custom_reward_function.path={tmp_path}/mine.py:reward", "reward_model.num_workers=1"]
    said = [{"role": "assistant", "content": "ab"}, {"role": "tool", "content": "4"}]
    turns = [[*said, said[0]], said[:1], said[:1], []]
    found = [replace(one, extras={"conversation": own}) for one, own in zip(episodes(), turns, strict=True)]
    with open_rewards(load(keys).config) as rewards:
        batch, _ = collector(rewards).score(drawn(rewards.begin(), found))
    assert batch.extras["score"] == [3.0, 1.0, 1.0, 0.0]


def test_the_baseline_by_column_refuses_several_turns_and_the_one_by_rank_serves_them():
    columns = {"old_log_probs": torch.full((4, 7), 0.5).log(), "sum_pi_squared": torch.full((4, 7), 0.5)}
    batch = scored(holes()).with_(**columns)
    for given in (batch, batch.with_(mask=batch.mask * 0)):
        with pytest.raises(UserError, match=r"adv_estimator=optimal_token_baseline: .*2 turns(.|\n)*=tir_optimal"):
            compute_advantages(given, AlgorithmConfig(adv_estimator="optimal_token_baseline"))
    single = batch.rows(torch.tensor([2, 3]))
    rejected = single.with_(mask=single.mask * torch.tensor([1, 0, 1, 0, 1, 0, 1]))
    compute_advantages(rejected, AlgorithmConfig(adv_estimator="optimal_token_baseline"))
    found = compute_advantages(batch, AlgorithmConfig(adv_estimator="tir_optimal_token_baseline"))
    assert (found.advantages[batch.mask == 0] == 0).all() and found.advantages[0, 4:].abs().sum() > 0


def test_every_token_has_the_version_that_drew_it(tmp_path, monkeypatch):
    """A step of critic warm-up changes no weights: versions 0, 0, 1; validation draws with the newest."""
    seen: dict[str, list[set[int]]] = {"trained": [], "validated": []}
    score = Collector.score

    def watched(self: Collector, drawn: Drawn, validation: bool = False) -> Any:
        batch = drawn.batch
        found = set(batch.versions[batch.mask == 1].tolist()) | set((batch.versions[batch.mask == 0] + 100).tolist())
        seen["validated" if validation else "trained"].append(found - {99})
        return score(self, drawn, validation)

    monkeypatch.setattr(Collector, "score", watched)
    keys = [
        *("algorithm.adv_estimator=gae", "trainer.critic_warmup=2", "trainer.total_training_steps=3"),
        *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        *("trainer.test_freq=3", "data.val_max_samples=2", "trainer.val_before_train=True", "trainer.save_last=False"),
        *("trainer.logger=[file]", "data.dataloader_num_workers=0", f"trainer.default_local_dir={tmp_path}"),
    ]
    assert train(load(keys).config).finished
    assert seen == {"trained": [{0}, {0}, {1}], "validated": [{0}, {2}]}
