"""A reward model beside several workers, or in a pool of its own, thinks what it thinks in one process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from devices import ON_DEVICE
from transformers import AutoConfig, AutoModelForSequenceClassification

from paddock.commands.preflight import check
from paddock.config.topology import pools
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.load import ASSETS, load_tokenizer
from paddock.trainer import reinforcement as runs

ray = pytest.importorskip("ray", reason="needs the extra `ray`")
cluster = pytest.importorskip("paddock.workers.ray")

SMALL = [
    "data.train_batch_size=8", "data.val_files=[]", "actor_rollout_ref.rollout.n=4", "trainer.test_freq=-1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8", "trainer.logger=[file]", "data.dataloader_num_workers=0",
    *ON_DEVICE, "trainer.total_training_steps=2", "algorithm.adv_estimator=grpo", "reward_model.enable=True",
]  # fmt: skip
OWN = ["reward_model.enable_resource_pool=True", "reward_model.nnodes=1", "reward_model.n_gpus_per_node=1"]


@pytest.fixture(scope="module", autouse=True)
def one_cluster() -> Iterator[None]:
    ray.init(num_cpus=2, **cluster.LOCAL)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(ASSETS / "tiny", num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    load_tokenizer("builtin:tiny").save_pretrained(folder)
    return folder


def train(folder: Path, reward_model: Path, *settings: str) -> list[dict[str, float]]:
    where = [f"trainer.default_local_dir={folder}", f"reward_model.model.path={reward_model}"]
    config = load([*SMALL, *where, *settings], chooses=True).config
    check(config)
    assert runs.train(config).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, reward_model) -> list[dict[str, float]]:
    return train(tmp_path_factory.mktemp("alone"), reward_model)


@pytest.mark.parametrize(
    "settings", [["trainer.n_gpus_per_node=2"], ["trainer.n_gpus_per_node=1", *OWN]], ids=["together", "apart"]
)
def test_processes_score_as_one_does(settings, alone, reward_model, tmp_path):
    found = train(tmp_path, reward_model, *settings)
    for mine, theirs in zip(found, alone, strict=True):
        for name in ("reward/model/mean", "reward/model/std", "reward/model/cut", "critic/score/mean"):
            assert mine[name] == pytest.approx(theirs[name], abs=1e-5), (theirs["step"], name)


def test_the_plan_places_the_reward_model_where_it_then_runs():
    path = "reward_model.model.path=builtin:tiny"
    together, *_ = pools(load([*SMALL, path, "trainer.n_gpus_per_node=2"], chooses=True).config)
    assert "reward_model" in together.roles
    main, own = pools(load([*SMALL, path, *OWN], chooses=True).config)
    assert "reward_model" not in main.roles and (own.name, own.size) == ("reward_model", 1)


def test_a_pool_without_nodes_is_refused():
    config = load(
        [*SMALL, "reward_model.model.path=builtin:tiny", "reward_model.enable_resource_pool=True"], chooses=True
    ).config
    with pytest.raises(UserError, match=r"reward_model.nnodes=0: its pool has no node"):
        check(config)
