"""A user's data set and a user's sampler: what they are given, what they must give, and what a mistake says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import ROOT

from paddock.config.schema import DataConfig, PluginConfig, SamplerConfig
from paddock.data.dataset import PromptDataset
from paddock.data.loader import Loader
from paddock.data.unscored import UnscoredDataset
from paddock.errors import UserError

TOKENIZER = byte_tokenizer()
SETS = """
import torch

class Sums(torch.utils.data.Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.lines = [line for path in data_files for line in open(path)]
        assert tokenizer is not None and config.prompt_key == "prompt"

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        question, answer = self.lines[index].strip().split(",")
        truth = {"style": "rule", "ground_truth": answer}
        return {"raw_prompt": [{"role": "user", "content": question}], "data_source": "sums", "reward_model": truth}

class Broken(Sums):
    def __getitem__(self, index):
        return "no dict"

class Unmade:
    def __init__(self, data_files):
        raise RuntimeError("no such server")

class Endless:
    pass
"""
SAMPLERS = """
import torch

class Backwards(torch.utils.data.Sampler):
    def __init__(self, data_source, data_config):
        self.count = len(data_source)
    def __iter__(self):
        return iter(range(self.count - 1, -1, -1))
    def __len__(self):
        return self.count

class Drawn(Backwards):
    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())

class Few(Backwards):
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        return iter([self.epoch, 3, 2])

class Beyond(Backwards):
    def __iter__(self):
        return iter([0, 99])

class Learning(Backwards):
    def update(self, batch):
        pass
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    (tmp_path / "sums.csv").write_text("".join(f"{n}+{n}=,{2 * n}\n" for n in range(10)))
    (tmp_path / "sets.py").write_text(SETS)
    (tmp_path / "samplers.py").write_text(SAMPLERS)
    return {name: str(tmp_path / name) for name in ("sums.csv", "sets.py", "samplers.py")}


def dataset(files, name="Sums", kind=PromptDataset):
    config = DataConfig(custom_cls=PluginConfig(files["sets.py"], name))
    return kind(files["sums.csv"], TOKENIZER, config, key="data.train_files")


def test_rows_are_those_of_the_users_data_set(files):
    found = dataset(files)
    assert len(found) == 10 and found.sources == {"sums": 10}
    row = found[3]
    assert (row.ground_truth, row.messages) == ("6", [{"role": "user", "content": "3+3="}])
    assert row.tokens and "Sums row 3" in row.location
    assert found.identity == dataset(files).identity
    Path(files["sums.csv"]).write_text("1+1=,2\n")
    assert dataset(files).identity != found.identity
    assert len(dataset(files, kind=UnscoredDataset)) == 1


@pytest.mark.parametrize(
    ("name", "key", "reason"),
    [
        ("Sumz", "data.custom_cls.name", "Sums"),
        ("Broken", "data.custom_cls.name", "not a dict"),
        ("Unmade", "data.custom_cls", "RuntimeError: no such server"),
        ("Endless", "data.custom_cls.name", "has no __len__"),
    ],
)
def test_a_class_that_cannot_serve_is_named_with_the_reason(files, name, key, reason):
    with pytest.raises(UserError, match=reason) as refused:
        dataset(files, name)
    assert refused.value.key == key


def test_a_file_that_cannot_be_imported_is_named(files):
    Path(files["sets.py"]).with_name("bad.py").write_text("import nothing_like_it")
    with pytest.raises(UserError, match="nothing_like_it") as refused:
        dataset(files | {"sets.py": files["sets.py"].replace("sets", "bad")})
    assert refused.value.key == "data.custom_cls.path"


def loader(files, name, batch=3, seed=5) -> Loader:
    sampler = SamplerConfig(files["samplers.py"], name)
    config = DataConfig(train_batch_size=batch, seed=seed, sampler=sampler, dataloader_num_workers=0)
    return Loader.train(config, dataset(files))


def epoch_of(found: Loader) -> list[list[int]]:
    return [[row.index for row in rows] for rows in found]


def test_the_users_sampler_orders_every_epoch(files):
    backwards = loader(files, "Backwards")
    assert epoch_of(backwards) == epoch_of(backwards) == [[9, 8, 7], [6, 5, 4], [3, 2, 1]]
    few = loader(files, "Few")
    assert few.steps_per_epoch == 1
    assert (epoch_of(few), epoch_of(few)) == ([[0, 3, 2]], [[1, 3, 2]])  # it is told the epoch


def test_what_a_sampler_draws_is_a_function_of_seed_and_epoch_and_resumes(files):
    one, other = loader(files, "Drawn"), loader(files, "Drawn")
    torch.manual_seed(77)
    first, second = epoch_of(one), epoch_of(one)
    torch.manual_seed(78)
    assert [epoch_of(other), epoch_of(other)] == [first, second] and first != second
    assert epoch_of(loader(files, "Drawn", seed=6)) != first
    again = loader(files, "Drawn")
    half = loader(files, "Drawn")
    half.next_prompts()
    again.load_state_dict(half.state_dict())
    assert epoch_of(again) == first[1:]
    with pytest.raises(UserError) as refused:
        loader(files, "Backwards").load_state_dict(half.state_dict())
    assert refused.value.key == "data.sampler.class_path"


@pytest.mark.parametrize(("name", "reason"), [("Beyond", "position 99"), ("Learning", "update"), ("Few2", "Few")])
def test_a_sampler_that_cannot_serve_is_named_with_the_reason(files, name, reason):
    with pytest.raises(UserError, match=reason) as refused:
        loader(files, name)
    assert refused.value.key == "data.sampler.class_name"


def test_a_batch_larger_than_an_epoch_of_the_sampler_is_refused(files):
    with pytest.raises(UserError) as refused:
        loader(files, "Few", batch=4)
    assert refused.value.key == "data.train_batch_size"


@pytest.mark.slow
def test_a_run_trains_on_the_users_rows_in_the_users_order(files, tmp_path):
    settings = [
        f"data.train_files={files['sums.csv']}", "data.val_files=null", "data.train_batch_size=4",
        f"data.custom_cls.path={files['sets.py']}", "data.custom_cls.name=Sums",
        f"data.sampler.class_path={files['samplers.py']}", "data.sampler.class_name=Backwards",
        "actor_rollout_ref.model.path=builtin:tiny", "algorithm.adv_estimator=grpo", "trainer.device=cpu",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=2", "trainer.test_freq=-1",
        "trainer.val_before_train=False", "trainer.save_freq=-1", f"trainer.default_local_dir={tmp_path / 'run'}",
        f"custom_reward_function.path={files['sets.py']}", "custom_reward_function.name=score",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
    ]  # fmt: skip
    with open(files["sets.py"], "a") as more:
        more.write("\ndef score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    command = [sys.executable, "-m", "paddock.cli", "train", *settings]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    asked = list(dict.fromkeys(row["prompt"] for row in first))
    assert [next(n for n in range(10) if f"{n}+{n}=" in prompt) for prompt in asked] == [9, 8, 7, 6]
