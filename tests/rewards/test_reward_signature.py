"""Functions are given what they name, whatever part of it that is; a wrong name is told what it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rewards.functions import RewardFunction, Target
from paddock.rewards.score import Failed, ScoreRequest
from paddock.trainer.assembly import open_rewards

REQUEST = ScoreRequest("gsm8k", "#### 72", "72", {"lvl": 3, "score": 0.25}, "a.parquet row 0", prompt="48+24?")


def scored(function, **kwargs) -> float:
    (score,) = RewardFunction(Target("python", "f", kwargs, function))([REQUEST])
    return score.value


def gsm8k(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """The shape of every scorer of verl's own."""
    assert method in ("strict", "flexible")
    return score if solution_str.endswith(ground_truth) else format_score


def test_a_scorer_of_verls_own_shape_is_called_and_no_column_replaces_its_defaults():
    assert scored(gsm8k) == 1.0  # not the row's `score`
    assert scored(gsm8k, score=2.0, method="flexible") == 2.0


@pytest.mark.parametrize(
    "function",
    [
        lambda solution_str: float(solution_str == "#### 72"),
        lambda ground_truth, extra_info: float((ground_truth, extra_info["lvl"]) == ("72", 3)),
        lambda data_source, **kwargs: float([*kwargs] == ["solution_str", "ground_truth", "extra_info"]),
        lambda completion, extra_info, lvl: float((completion, extra_info["lvl"]) == ("#### 72", lvl)),
        lambda lvl: float(lvl == 3),
        lambda completion, prompt, data_source: float((prompt, data_source) == ("48+24?", "gsm8k")),
    ],
)
def test_any_part_of_what_there_is_may_be_named(function):
    assert scored(function) == 1.0


MISTAKES = {
    "misspelt": (lambda completoin, answer: 1.0, "takes 'completoin', and", "did you mean 'completion'"),
    "a column": (lambda completion, lvel: 1.0, "columns of the rows: lvl, score", "did you mean 'lvl'"),
    "letters": (lambda c, a: 1.0, "takes 'c' and 'a', and nothing", "the response is `completion`. Or give it a"),
    "a truth": (lambda solution, ground_truth: 1.0, "takes 'solution', which is the row's ground truth, and no", "f("),
    "of verl's": (lambda solution_str, ground_truht: 1.0, "may name data_source, solution_str", "'ground_truth'"),
    "a column of verl's": (lambda solution_str, lvl: 1.0, "takes 'lvl'", "`completion` in place of `solution_str`"),
    "a batch": (lambda solution_strs, ground_truths: [1.0], "takes 'solution_strs' and", "reward_manager=batch calls"),
    "by position": (lambda completion, /: 1.0, "takes 'completion' by its position", "the response is `completion`"),
    "nothing": (lambda: 1.0, "takes nothing of what it is given", "name what"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_name_is_told_what_it_may_be(mistake):
    function, reason, fix = MISTAKES[mistake]
    with pytest.raises(Failed) as error:
        scored(function)
    assert reason in str(error.value) and fix in error.value.fix


ONE = "def f(solution_str, ground_truth): return float(ground_truth in solution_str)"
WAYS = {
    "naive": ONE,
    "dapo": ONE,
    "rate_limited": f"async {ONE}",
    "batch": "def f(solution_strs): return [float('72' in text) for text in solution_strs]",
}


@pytest.mark.parametrize("name", WAYS)
def test_every_manager_gives_a_functions_process_what_it_names(tmp_path, name):
    Path(tmp_path / "mine.py").write_text(
        WAYS[name] + "\ndef g(solution_str, ground_truht, solution_strs=1): return 1.0\n"
    )
    settings = [f"reward_model.reward_manager={name}", "reward_model.num_workers=1"]
    with open_rewards(load([f"custom_reward_function.path={tmp_path}/mine.py:f", *settings]).config) as rewards:
        rewards.check([REQUEST])
        assert [score.value for score in rewards.score([REQUEST])] == [1.0]
    with (
        open_rewards(load([f"custom_reward_function.path={tmp_path}/mine.py:g", *settings]).config) as rewards,
        pytest.raises(UserError, match="ground_truht") as error,
    ):
        rewards.check([REQUEST])
    assert "finite number" not in error.value.fix
