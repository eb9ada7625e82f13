"""`paddock keys`: keys by name and by meaning, and all that is known about one."""

from __future__ import annotations

import pytest

from paddock.cli import main
from paddock.config import tree
from paddock.help.keys_command import search
from paddock.loading import foreign


def said(capsys, *words: str) -> str:
    assert main(["keys", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("learning rate", "actor_rollout_ref.actor.optim.lr"),
        ("responses per prompt", "actor_rollout_ref.rollout.n"),
        ("lora", "actor_rollout_ref.model.lora_rank"),
        ("tempreature", "actor_rollout_ref.rollout.temperature"),
        ("longest response", "data.max_response_length"),
        ("validate every", "trainer.test_freq"),
        ("scorer file", "custom_reward_function.path"),
        ("seed", "trainer.seed"),
    ],
)
def test_the_key_that_is_meant_comes_first(words, first):
    found, every = search(words.split())
    assert found[0].key == first and every


def test_one_key_is_shown_with_everything_that_is_known(capsys):
    text = " ".join(said(capsys, "actor_rollout_ref.rollout.n").split())
    for part in ("meaning responses per prompt", "default 1; 5 with algorithm.adv_estimator=grpo", "8 in the embedded",
                 "type whole number", "limits >= 1", "commands train, plan, generate, eval"):  # fmt: skip
        assert part in text


def test_a_key_that_another_follows_names_it_and_choices_are_limits(capsys):
    text = " ".join(said(capsys, "data.train_batch_size").split())
    assert "followed by data.gen_batch_size" in text
    assert "default the value of data.train_batch_size" in " ".join(said(capsys, "data.gen_batch_size").split())
    assert "one of error, left, right, middle" in said(capsys, "data.truncation")


def test_sections_are_listed_with_their_counts_and_a_section_with_its_keys(capsys):
    text = said(capsys)
    assert f"{len(tree.leaves())} keys in" in text and "actor_rollout_ref.rollout" in text
    assert said(capsys, "algorithm.kl_ctrl").splitlines()[0] == "4 keys in algorithm.kl_ctrl:"


@pytest.mark.parametrize(
    ("word", "becomes"),
    [
        ("reward_manager.name", "is called reward_model.reward_manager here"),
        ("data.return_raw_chat", "ignored, messages are always kept"),
        ("global_profiler.tool", "refused (no profiler is started) unless it is null; fix: leave it out"),
        ("trainer.default_hdfs_dir", "refused (HDFS is not written) unless it is null; fix: mount it"),
        ("actor_rollout_ref.rollout.val_temperature", "becomes other keys (a temperature above 0 samples)"),
        ("actor_rollout_ref.actor.veomni.anything", "refused (veomni is not a training engine here)"),
    ],
)
def test_a_key_of_another_system_says_what_becomes_of_it(word, becomes, capsys):
    assert f"  {word}: {becomes}" in said(capsys, word)


def test_keys_of_other_systems_are_found_by_a_part_of_their_name(capsys):
    text = said(capsys, "ppo_micro_batch_size")
    assert "critic.ppo_micro_batch_size_per_gpu" in text and "\n  critic.ppo_micro_batch_size: becomes" in text
    assert all(foreign.rule_for(key) for key in foreign.rules())


def test_words_that_no_key_has_are_answered_with_the_nearest(capsys):
    assert main(["keys", "xyzzyplugh"]) == 2
    assert "no key has this name or meaning" in capsys.readouterr().err
    assert main(["keys", "--json"]) == 2
