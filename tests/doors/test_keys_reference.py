"""The generated reference of keys, and what help knows about them, are what the schema and the source say."""

from __future__ import annotations

import ast
import importlib.util
import sys

import pytest
from conftest import ROOT

from paddock.config import tree
from paddock.help.keys_command import CHECKING
from paddock.loading.refusals import NOT_BUILT


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
    assert "loading.refusals" in read["trainer.esi_redundant_time"]  # tree.get of a table of texts
    assert "algorithms.losses" in read["actor_rollout_ref.actor.policy_loss.clip_cov_lb"]  # a config of any type
    assert "algorithms.losses" in read["actor_rollout_ref.actor.policy_loss.dro_beta"]  # by getattr
    assert "config.rollout_correction" in read["algorithm.rollout_correction.rollout_rs"]  # by vars
    assert "engines.train.settings" in read["critic.model.fsdp_config.model_dtype"]  # after isinstance


def test_a_read_is_of_the_section_that_the_code_names(reference):
    """`config.critic.optim.lr` says nothing about the actor's; a parameter `optim: OptimConfig` is either."""
    from key_readers import Program, Reads

    source = ast.parse(
        "def one(config: Config): return config.critic.optim.lr\n"
        "def any_of(optim: OptimConfig): return optim.betas\n"
        "def shown(config: Config): return vars(config.trainer)\n"
    )
    found = Reads(Program([source]), source, looks_up=False).found
    assert found >= {("critic.optim", "lr"), ("critic.optim", "betas"), ("actor_rollout_ref.actor.optim", "betas")}
    assert ("actor_rollout_ref.actor.optim", "lr") not in found
    assert not [field for section, field in found if section == "trainer"]


ONLY_CHECKED = {
    *NOT_BUILT,
    *(f"actor_rollout_ref.rollout.{name}" for name in ("data_parallel_size", "checkpoint_engine.backend",
                                                       "checkpoint_engine.engine_kwargs")),
    *(f"{role}.megatron.{name}" for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
      for name in ("virtual_pipeline_model_parallel_size", "use_dist_checkpointing", "override_ddp_config",
                   "override_mcore_model_config")),
    *(f"{role}.checkpoint.{name}" for role in ("actor_rollout_ref.actor", "critic")
      for name in ("load_contents", "async_save")),
    "reward_model.strategy",
}  # fmt: skip
"""Keys that no code honours: any value but those that ask for nothing is refused."""


def test_every_key_of_the_schema_has_an_effect_or_is_refused(read):
    """A module that only shows values (plan, report) or only checks them does not honour a key."""
    passive = ("plan.", "report.", *CHECKING)
    unread = {key for key, modules in read.items() if all(module.startswith(passive) for module in modules)}
    assert set(read) == set(tree.leaves())
    assert unread - ONLY_CHECKED == set(), "no code reads these: honour them, or give them a rule in verl/keys.py"
    assert ONLY_CHECKED - unread == set(), "these are honoured now: take them off the list"
    checks = ("loading.rules", "loading.refusals")
    assert [key for key in ONLY_CHECKED if not any(module.startswith(checks) for module in read[key])] == []


def test_most_keys_have_a_chinese_meaning_and_no_translation_is_of_another_key(reference):
    chinese = reference.translations()
    users = [key for key in reference.entries() if key.split(".")[0] in ("data", "trainer", "algorithm", "critic")]
    translated = sum(key in chinese for key in users)
    assert translated > 0.9 * len(users)
    assert all(any("\u4e00" <= letter <= "\u9fff" for letter in text) or "token" in text for text in chinese.values())
