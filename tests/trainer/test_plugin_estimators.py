"""An estimator in a user's module declares what it needs once, and the run honours it."""

from __future__ import annotations

import json
import textwrap

import pytest

from paddock.algorithms.advantages import ESTIMATOR
from paddock.config import recipes
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.trainer.reinforcement import train

MODULE = """
from paddock.algorithms.advantages import estimator

@estimator("{name}", needs={needs})
def own(batch, config):
    '''Rewards less what the run was asked for.'''
    found = batch.need("{column}")
    found = found if found.dim() == 2 else found[:, None].expand_as(batch.mask)
    advantages = (batch.need("rewards").sum(-1, keepdim=True) - found) * batch.mask
    return advantages, advantages
"""
SMALL = [
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2",
    "trainer.logger=[file]", "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.save_last=False",
    "data.dataloader_num_workers=0",
]  # fmt: skip


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Writes a module with one estimator; forgets the estimator afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def write(name: str, needs: set[str], column: str) -> list[str]:
        (tmp_path / f"module_of_{name}.py").write_text(
            textwrap.dedent(MODULE.format(name=name, needs=needs, column=column))
        )
        names.append(name)
        return [f"algorithm.adv_estimator={name}", f"actor_rollout_ref.model.external_lib=module_of_{name}"]

    yield write
    for name in names:
        recipes.ESTIMATORS.pop(name, None)
        ESTIMATOR._entries.pop(name, None)


@pytest.mark.parametrize(
    ("need", "column"),
    [("critic", "values"), ("greedy_baseline", "baseline_scores"), ("sum_pi_squared", "sum_pi_squared")],
)
def test_what_a_plug_in_declares_is_there_when_it_is_called(need, column, plugin, tmp_path):
    keys = plugin(f"own_{need}", {need}, column)
    config = load([*SMALL, *keys, f"trainer.default_local_dir={tmp_path / 'run'}"]).config
    assert config.critic.enable == (need == "critic")
    assert train(config).finished
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert ("critic/vf_loss" in lines[0]) == (need == "critic")


def test_groups_that_a_plug_in_needs_are_asked_for_before_anything_is_loaded(plugin):
    with pytest.raises(UserError, match=r"rollout\.n=1: own_groups compares the responses"):
        load([*SMALL, *plugin("own_groups", {"groups"}, "rewards"), "actor_rollout_ref.rollout.n=1"])


def test_a_need_that_nobody_knows_is_refused_with_those_that_are(plugin):
    with pytest.raises(UserError, match=r"module_of_own_luck: cannot be imported: .*unknown needs \['luck'\]"):
        load([*SMALL, *plugin("own_luck", {"luck"}, "rewards")])
