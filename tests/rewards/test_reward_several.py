"""Several rules and functions: their names, weights and arguments, the sum, and what is logged of each."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

import paddock
from paddock.algorithms.advantages import compute_advantages
from paddock.algorithms.selection import group_metric
from paddock.config.rewards import reward_parts
from paddock.config.schema import Config, CustomRewardConfig
from paddock.core.batch import Batch
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rewards.manager import RewardManager
from paddock.trainer.assembly import open_rewards

CODE = """
import time

def right(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)

def graded(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str), "length": len(solution_str)}

def short(completions, **columns):
    return [None if text == "skip" else -float(len(text)) for text in completions]

async def polite(completions, word, **columns):
    return [float(word in text) for text in completions]

def slow(completions):
    time.sleep(1.0)
    return [1.0] * len(completions)

slower = slow

def hangs(data_source, solution_str, ground_truth, extra_info):
    time.sleep(100 if solution_str == "hang" else 0)
    return 1.0
"""
PATH = "custom_reward_function"


@pytest.fixture
def manager(tmp_path):
    made = []

    def make(names: str, *settings: str) -> RewardManager:
        (tmp_path / "mine.py").write_text(textwrap.dedent(CODE))
        named = [f"{PATH}.path={tmp_path}/mine.py", f"{PATH}.name={names}", "reward_model.num_workers=2", *settings]
        made.append(open_rewards(load(named).config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def batch_of(truths: list[str], **extras) -> Batch:
    ids, mask = torch.arange(len(truths)), torch.tensor([[1, 1, 0]] * len(truths))
    given = {"data_source": ["mine"] * len(ids), "ground_truth": truths, "messages": ["?"] * len(ids)} | extras
    return Batch(ids, ids // 2, ids[:, None], responses=mask, mask=mask, lengths=mask.sum(-1), extras=given)


# The sum, and what is logged


def test_the_score_is_the_weighted_sum_and_each_part_has_its_column_and_metrics(manager):
    rewards = manager("[right,short]", f"{PATH}.weights=[2,0.5]", "reward=contains", "reward_weights=[10]")
    batch, metrics = rewards.fill(batch_of(["ab", "ab", "skip", "ab"]), ["ab", "abc", "skip", "ab c"])
    assert batch.extras["contains"] == [1, 0, 1, 1] and batch.extras["right"] == [1, 0, 1, 0]
    assert batch.extras["short"] == [-2, -3, None, -4]
    # 10 contains + 2 right + 0.5 short: 10 + 2 - 1, 0 + 0 - 1.5, 10 + 2 + nothing, 10 + 0 - 2
    assert batch.scores.sum(-1).tolist() == batch.extras["score"] == [11.0, -1.5, 12.0, 8.0]
    wanted = {
        "reward/score/mean": 29.5 / 4,
        "reward/contains/mean": 0.75,
        "reward/contains/std": 0.1875**0.5,
        "reward/right/mean": 0.5,
        "reward/right/std": 0.5,
        "reward/short/mean": -3.0,
        "reward/short/std": (2 / 3) ** 0.5,
    }
    counts = {"reward/unscored": 0.0, "reward/timeouts": 0.0, "reward/cache_hits": 0.0}
    assert metrics == pytest.approx(wanted | counts)


def test_values_that_functions_return_beside_their_score_keep_their_names(manager):
    batch, metrics = manager("[right,graded]").fill(batch_of(["ab"]), ["ab"])
    assert batch.extras["length"] == [2] and metrics["reward/length/mean"] == 2 and batch.extras["score"] == [3]


def test_two_values_of_one_name_are_refused_before_training(manager, tmp_path):
    (tmp_path / "other.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info): return {'score': 1, 'length': 2}"
    )
    rewards = manager("compute_score", f"{PATH}.path=[{tmp_path}/mine.py:graded,{tmp_path}/other.py:f]")
    with pytest.raises(UserError, match=r"other.py:f: returns 'length' beside its score, and another value"):
        rewards.fill(batch_of(["ab"]), ["ab"])


def test_each_function_has_arguments_of_its_own(manager):
    rewards = manager("[right,polite]", f"{PATH}.reward_kwargs={{polite: {{word: please}}}}")
    batch, _ = rewards.fill(batch_of(["ab", "ab"]), ["ab", "ab please"])
    assert batch.extras["score"] == [1, 1] and batch.extras["polite"] == [0, 1]


def test_functions_of_whole_batches_run_side_by_side(manager):
    import time

    rewards = manager("[slow,slower]")
    rewards.fill(batch_of(["a"]), ["a"])  # both processes have started
    began = time.monotonic()
    rewards.fill(batch_of(["a"]), ["a"])
    assert time.monotonic() - began < 1.9


def test_a_part_that_is_cut_off_counts_as_zero_and_the_others_stay(manager):
    batch, metrics = manager("[right,hangs]", "reward_model.timeout=1").fill(batch_of(["hang", "a"]), ["hang", "a"])
    assert batch.extras["score"] == [1, 2] and batch.extras["hangs"] == [0, 1] and metrics["reward/timeouts"] == 1


def test_a_check_names_the_function_that_hangs(manager, tmp_path):
    from paddock.rewards.score import ScoreRequest

    with pytest.raises(UserError, match=r"hangs took longer than 1 s \(reward_model.timeout\), on a row"):
        manager("[right,hangs]", "reward_model.timeout=1").check([ScoreRequest("mine", "hang", "")])


def test_rows_that_a_reward_model_scores_are_shown_to_no_part(manager):
    rewards = manager("[right,short]")
    batch, metrics = rewards.fill(batch_of(["a", "a"], style=["model", "rule"]), ["a", "a"])
    assert batch.extras["right"] == [None, 1.0] and batch.scores.sum(-1).tolist() == [0, 0]
    assert metrics["reward/unscored"] == 0


def test_one_function_of_ours_without_a_weight_is_the_score_itself(manager):
    batch, metrics = manager("graded").fill(batch_of(["ab"]), ["ab"])
    assert set(metrics) == {"reward/score/mean", "reward/length/mean", "reward/timeouts", "reward/cache_hits"}
    assert "graded" not in batch.extras
    batch, metrics = manager("graded", f"{PATH}.weights=[0.5]").fill(batch_of(["ab"]), ["ab"])
    assert batch.extras["score"] == [1] and batch.extras["graded"] == [2] and metrics["reward/graded/std"] == 0


# What the config says


def parts_of(reward=None, reward_weights=None, **custom) -> list[tuple[str, float, str | None, str]]:
    config = Config(reward=reward, reward_weights=reward_weights, custom_reward_function=CustomRewardConfig(**custom))
    return [(part.name, part.weight, part.path, part.function) for part in reward_parts(config)]


OURS = "compute_score"


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, []),
        ({"path": "d/a.py"}, [(OURS, 1, "d/a.py", OURS)]),
        ({"path": "d/a.py:f"}, [("f", 1, "d/a.py", "f")]),
        ({"path": ["a.py", "b.py:fmt"], "weights": [1, 0.2]}, [(OURS, 1, "a.py", OURS), ("fmt", 0.2, "b.py", "fmt")]),
        ({"path": ["a.py", "b.py"]}, [("a.compute_score", 1, "a.py", OURS), ("b.compute_score", 1, "b.py", OURS)]),
        ({"path": ["a.py", "b.py:f"], "name": "g"}, [("g", 1, "a.py", "g"), ("f", 1, "b.py", "f")]),
        ({"path": "a.py", "name": ["f", "g"]}, [("f", 1, "a.py", "f"), ("g", 1, "a.py", "g")]),
        ({"path": "reward.py:reward"}, [("reward.reward", 1, "reward.py", "reward")]),
        ({"path": "pkg://package.module:f"}, [("f", 1, "pkg://package.module", "f")]),
        ({"path": "pkg://package.module"}, [(OURS, 1, "pkg://package.module", OURS)]),
        (
            {"reward": ["math", "regex"], "reward_weights": [1, 0.5], "path": "a.py:math"},
            [("math", 1, None, "math"), ("regex", 0.5, None, "regex"), ("a.math", 1, "a.py", "math")],
        ),
    ],
)
def test_the_config_names_parts(settings, parts):
    assert parts_of(**settings) == parts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": ["a.py", "b.py:f"], "weights": [1]}, r"2 functions and 1 weights\n  fix: .*\[1,1\]"),
        ({"path": "a.py", "weights": [float("nan")]}, "nan is not a weight"),
        ({"path": ["a.py", 3]}, "3 is not a name"),
        ({"path": ["a.py:f", "a.py:f"]}, "two functions are both called a.f"),
        ({"path": ["a.py", "b.py"], "name": ["f", "g"]}, r"2 functions for 2 files\n  fix: .*a.py:f,b.py:g"),
        ({"path": "a.py:f", "name": "g"}, "named in custom_reward_function.path already"),
        (
            {"path": "a.py", "name": ["f", "g"], "reward_kwargs": {"bonus": 1}},
            r"reward_kwargs.bonus=1: 'bonus' is none of the functions f, g\n  fix: .*\{f: \{argument: value\}\}",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        parts_of(**settings)


def test_a_file_of_several_that_is_not_there_is_named(tmp_path):
    (tmp_path / "a.py").touch()
    with pytest.raises(UserError, match=r"no.py: no such file"):
        load([f"{PATH}.path=[{tmp_path}/a.py,{tmp_path}/no.py:f]"])


# Algorithms that look at parts

GDPO = ["algorithm.adv_estimator=gdpo", "actor_rollout_ref.rollout.n=2"]


def test_gdpo_normalises_each_part_and_weighs_it_as_the_sum_does(manager, tmp_path):
    weighed = (f"{PATH}.weights=[1,0.2]", *GDPO)
    rewards = manager("[right,short]", *weighed)
    algorithm = load([f"{PATH}.path={tmp_path}/mine.py", f"{PATH}.name=[right,short]", *weighed]).config.algorithm
    assert algorithm.gdpo_reward_keys == ["right", "short"] and algorithm.gdpo_reward_weights == [1, 0.2]
    batch, _ = rewards.fill(batch_of(["ab", "ab", "skip", "skip"]), ["ab", "abc", "skip", "skip"])
    advantages = compute_advantages(batch.with_(rewards=batch.scores), algorithm).advantages[:, 0]
    # first group: right is 1, 0 and short -2, -3, both in favour of the first; second: all alike, and None is 0
    assert advantages[0] > 0.5 and advantages[1] < -0.5 and advantages[2:].abs().max() < 1e-6
    named = load(
        [f"{PATH}.path={tmp_path}/mine.py", f"{PATH}.name=[right,short]", "algorithm.gdpo_reward_keys=[short]", *GDPO]
    )
    assert named.config.algorithm.gdpo_reward_keys == ["short"], "what the user names stays"


def test_groups_can_be_filtered_by_a_part_that_does_not_apply_everywhere(manager):
    batch, _ = manager("[right,short]").fill(batch_of(["a", "b", "c"]), ["a", "skip", "ccc"])
    assert group_metric(batch, "short").tolist() == [-1, 0, -3]


@pytest.mark.parametrize(("settings", "rules", "paths", "weights"), [
    (["reward=r.py:f"], None, ["r.py:f"], None),
    (["reward=[math,r.py:f,mine.own:g]"], ["math"], ["r.py:f", "pkg://mine.own:g"], None),
    (["reward=[math,r.py:f]", "reward_weights=[1,0.5]"], ["math"], ["r.py:f"], [0.5]),
])  # fmt: skip
def test_reward_takes_functions_by_their_address_as_environment_and_tools_do(
    settings, rules, paths, weights, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    Path("r.py").write_text("def f(completion: str) -> float:\n    return 0.5\n")
    by_command = load(settings).config
    assert (by_command.reward, by_command.custom_reward_function.path) == (rules, paths)
    assert by_command.custom_reward_function.weights == weights
    names = [*(rules or ()), *(path.removeprefix("pkg://") for path in paths)]
    by_library = paddock.Run(reward=names if weights is None else dict(zip(names, (1, 0.5), strict=True))).config
    assert by_library.custom_reward_function.path == paths and by_library.custom_reward_function.weights == weights


def test_functions_are_named_by_one_key():
    with pytest.raises(
        UserError, match=r"reward=r.py:f: names a function, and custom_reward_function.path names others"
    ):
        load(["reward=r.py:f", "custom_reward_function.path=q.py"])
