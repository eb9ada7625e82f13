"""Keys whose effect no other test shows: each does in a run what its meaning says."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

from paddock.engines.train import forwards
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.load import open_tokenizer
from paddock.trainer.reinforcement import train

SMALL = ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
         "trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=False",
         "trainer.logger=[file]", "data.dataloader_num_workers=0"]  # fmt: skip
A = "actor_rollout_ref.actor"


def run(folder: Path, *overrides: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    assert train(load([*SMALL, f"trainer.default_local_dir={folder}", *overrides]).config).finished
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return line, load_file(folder / "global_step_1" / "actor" / "model.safetensors")


def test_entropy_that_nothing_needs_is_not_computed_and_changes_no_weight(tmp_path, monkeypatch):
    computed = []

    def watched(*args, entropy=False, **others):
        computed.append(entropy)
        return token_stats(*args, entropy=entropy, **others)

    token_stats = forwards.token_stats
    monkeypatch.setattr(forwards, "token_stats", watched)
    with_it, weights = run(tmp_path / "with", "algorithm.adv_estimator=grpo")
    assert with_it["actor/entropy"] > 0 and any(computed)
    computed.clear()
    without, same = run(tmp_path / "without", "algorithm.adv_estimator=grpo", f"{A}.calculate_entropy=False")
    assert "actor/entropy" not in without and not any(computed)
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_a_bonus_needs_entropy_whatever_the_key_says(tmp_path):
    keys = (f"{A}.calculate_entropy=False", f"{A}.entropy_coeff=0.01")
    line, _ = run(tmp_path, "algorithm.adv_estimator=grpo", *keys)
    assert line["actor/entropy"] > 0


def test_a_module_of_the_critics_own_is_imported_before_its_weights(tmp_path, monkeypatch):
    (tmp_path / "critics_library.py").write_text("IMPORTED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "critics_library", raising=False)
    run(tmp_path / "run", "algorithm.adv_estimator=gae", "critic.model.external_lib=critics_library")
    assert sys.modules["critics_library"].IMPORTED
    with pytest.raises(UserError) as error:
        run(tmp_path / "other", "algorithm.adv_estimator=gae", "critic.model.external_lib=no_such_library")
    assert (error.value.key, error.value.value) == ("critic.model.external_lib", "no_such_library")


def test_code_of_a_tokenizer_runs_only_if_the_data_says_so(tmp_path):
    folder = tmp_path / "tokenizer"
    shutil.copytree(ROOT / "paddock/assets/tiny", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "mine.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Mine(PreTrainedTokenizerFast):\n    mine = True\n"
    )
    file = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    keys = [f"data.tokenizer={folder}", "trainer.device=cpu"]
    trusting, other = load([*keys, "data.trust_remote_code=True"]).config, load(keys).config
    assert open_tokenizer(trusting.actor_rollout_ref.model, trusting.data).mine
    assert not hasattr(open_tokenizer(other.actor_rollout_ref.model, other.data), "mine")
