"""Traps that others fell into, where the way out runs through several rooms. The others stand beside what they test."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model

from paddock.config.engine import OptimConfig
from paddock.core.balance import needed_micro_batches, token_budget_micro_batches
from paddock.core.masked import Denominators, aggregate
from paddock.engines.rollout.base import Completion, Request
from paddock.engines.rollout.embedded import open as embedded
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.loading.load import load
from paddock.models.packing import sequence_lengths
from paddock.trainer.reinforcement import train
from paddock.workers.updates import Average


class LightSleeper(EmbeddedEngine):
    """Frees its memory after each call, and tells who asks it while the trainer has put it to sleep."""

    asleep = False
    steps: list[int]

    def answer(self, requests: list[Request], *others: Any) -> list[Completion]:
        assert not self.asleep, "asked for responses while asleep"
        self.steps.append(requests[0].step)
        found = super().answer(requests, *others)
        super().sleep()
        return found

    def sleep(self) -> None:
        super().sleep()
        self.asleep = True

    def wake(self) -> None:
        super().wake()
        self.asleep = False


def warm_up(folder: Path) -> list[dict[str, float]]:
    """Three steps, the first two of which train the critic alone, with a validation after each."""
    config = load([
        "algorithm.adv_estimator=gae", "trainer.critic_warmup=3", "trainer.total_training_steps=3",
        "data.train_batch_size=8", "data.val_max_samples=8", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.test_freq=1", "trainer.logger=[file]",
        "data.dataloader_num_workers=0", f"trainer.default_local_dir={folder}",
    ]).config  # fmt: skip
    assert train(config).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_trap_7_engines_that_sleep_answer_in_every_step_of_the_critic_warm_up(tmp_path, monkeypatch):
    """Nothing pushes weights in a warm-up step, so nothing may rely on that to wake the engine."""
    expected = warm_up(tmp_path / "awake")
    LightSleeper.steps = []
    monkeypatch.setattr(embedded, "EmbeddedEngine", LightSleeper)
    found = warm_up(tmp_path / "asleep")
    assert set(LightSleeper.steps) >= {1, 2, 3} and len(LightSleeper.steps) == 3 + 4  # and four validations
    assert ["actor/pg_loss" in row for row in found] == [False, False, False, True]
    assert ["critic/vf_loss" in row for row in found] == [False, True, True, True]
    timed = ("timing", "perf")
    for row, other in zip(found, expected, strict=True):
        assert {k: v for k, v in row.items() if not k.startswith(timed)} == {
            k: v for k, v in other.items() if not k.startswith(timed)
        }


RANKS = {"long": [900, 800, 700, 600, 500, 400], "short": [50, 40, 30, 20], "one row": [700]}
BUDGET = 1000


def test_trap_8_ranks_agree_on_the_number_of_micro_batches_and_none_waits_for_ever():
    """A rank with fewer micro-batches leaves the others in a collective. All use the largest number any needs."""
    needed = {rank: needed_micro_batches(lengths, BUDGET) for rank, lengths in RANKS.items()}
    assert len(set(needed.values())) > 1, "cut by themselves, the ranks would differ"
    parts = {
        rank: token_budget_micro_batches(lengths, BUDGET, count=max(needed.values())) for rank, lengths in RANKS.items()
    }
    collective, finished = Barrier(len(RANKS), timeout=10), []

    def run(rank: str) -> None:
        for part in parts[rank]:
            assert sum(RANKS[rank][row] for row in part) <= BUDGET
            collective.wait()
        finished.append(rank)

    threads = [Thread(target=run, args=(rank,)) for rank in RANKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(finished) == sorted(RANKS)
    for rank, lengths in RANKS.items():
        assert sorted(row for part in parts[rank] for row in part) == list(range(len(lengths)))


def test_trap_8_a_rank_with_too_few_rows_runs_empty_micro_batches_that_change_nothing():
    batch = tiny_batch()
    denominators = Denominators.count(batch.need("mask"))

    def loss(micro, outputs):
        total = aggregate(outputs.log_probs, micro.need("mask"), "token-mean", denominators)
        return total, {"mean": total.detach()}

    def step(count):
        model = tiny_model()
        model.set_attn_implementation("paddock")
        engine = Engine(SingleBackend(model, Settings(budget=Budget(512), optim=OptimConfig(lr=0.01))))
        parts = token_budget_micro_batches(sequence_lengths(batch), 512, count=count)
        micros = [batch.rows(torch.tensor(part, dtype=torch.long)) for part in parts]
        metrics = engine.train_step(micros, loss, frozenset({"log_probs"}))
        return metrics, {name: tensor.clone() for name, tensor in engine.weights()}

    one, weights = step(len(batch))
    more, same = step(len(batch) + 3)
    assert more == pytest.approx(one)
    for name, tensor in weights.items():
        torch.testing.assert_close(same[name], tensor)


def test_trap_12_what_a_metric_is_called_does_not_change_its_mean_over_updates():
    names = ("actor/pg_loss", "actor/admin_rate", "actor/max_margin", "actor/minutes", "critic/summary")
    seen = Average()
    for value in (1.0, 4.0, 4.0):
        seen.add(dict.fromkeys(names, value))
    assert seen.means() == dict.fromkeys(names, 3.0)
