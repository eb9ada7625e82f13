"""The generated reference of keys, and what help knows about them, are what the schema and the source say."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from conftest import ROOT


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("keys_reference", ROOT / "tools" / "keys_reference.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def read(reference):
    return reference.readers()


def test_pages_and_data_are_up_to_date(reference, read):
    for file, text in reference.files(read).items():
        assert file.read_text(encoding="utf-8") == text, f"{file.name} is not up to date: make keys-reference"


def test_readers_are_found_through_types_texts_and_the_algorithms_own_config(read):
    assert "trainer.loop" in read["trainer.critic_warmup"]  # self.config of a base class
    assert "engines.train.optim" in read["critic.optim.lr"]  # a section that actor and critic share
    assert "workers.reward_model" in read["reward_model.rollout.data_parallel_size"]  # getattr in a loop
    assert "preflight" in read["trainer.esi_redundant_time"]  # tree.get of a table of texts
    assert "algorithms.losses" in read["actor_rollout_ref.actor.policy_loss.clip_cov_lb"]  # a config of any type
    assert read["critic.nccl_timeout"] == [] and read["actor_rollout_ref.ref.profiler.enable"] == []


def test_most_keys_have_a_chinese_meaning_and_no_translation_is_of_another_key(reference):
    chinese = reference.translations()
    users = [key for key in reference.entries() if key.split(".")[0] in ("data", "trainer", "algorithm", "critic")]
    translated = sum(key in chinese for key in users)
    assert translated > 0.9 * len(users)
    assert all(any("\u4e00" <= letter <= "\u9fff" for letter in text) or "token" in text for text in chinese.values())
