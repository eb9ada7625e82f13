"""A run whose rewards teach nothing says so once, with the likely cause, in its log, its summary and its page; and what
reward functions print has a file of its own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from test_loop import run

from paddock.core.batch import Batch
from paddock.errors import UserError
from paddock.report.page import render
from paddock.report.summary import summary_lines
from paddock.runs.reading import read_run
from paddock.trainer.learning import warning
from paddock.trainer.metrics import signal_metrics

GRPO, THREE = "algorithm.adv_estimator=grpo", "trainer.total_training_steps=4"
SAVED_LAST = "trainer.save_freq=-1"
DEAD = {"reward/alike": 1.0, "critic/score/mean": 0.0}


def scored(folder: Path, source: str, *overrides: str) -> list[dict[str, float]]:
    (folder / "r.py").write_text(source)
    own = ["actor_rollout_ref.rollout.n=2", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    name = f"custom_reward_function.path={folder / 'r.py'}"
    return run(folder / "run", GRPO, THREE, SAVED_LAST, "data.val_files=null", name, *own, *overrides)


def warnings_of(caplog, text: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and text in r.getMessage()]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"reward/unscored": 32.0}, "returned None for 32 responses"),
        ({"reward/timeouts": 4.0}, "4 calls of the last step took longer than reward_model.timeout"),
        ({"training/same_prompts": 1.0, "num_turns/mean": 2.0}, "what reset() of the environment returns"),
        ({"response_length/clip_ratio": 1.0}, "raise data.max_response_length"),
        ({}, "compare responses with their ground truths"),
    ],
)
def test_three_steps_that_tell_no_response_from_another_are_named_with_their_likely_cause(metrics, said):
    found = warning([DEAD | metrics] * 3)
    assert found and "all responses to a prompt scored alike (0 on average)" in found and said in found


def test_equal_prompts_are_named_unless_an_environment_asks():
    row = {"reward/alike": 0.5, "training/same_prompts": 1.0}
    assert "all prompts were the same" in (warning([row] * 3) or "")
    assert warning([row | {"num_turns/mean": 2.0}] * 3) is None


def test_a_run_that_learns_or_has_no_rewards_or_fewer_steps_is_left_alone():
    assert warning([DEAD] * 2) is None
    assert warning([DEAD, DEAD, DEAD | {"reward/alike": 0.9}]) is None
    assert warning([{"train/loss": 1.0}] * 5) is None


def test_responses_are_compared_with_those_to_their_prompt_and_single_ones_with_all_others():
    rows = {"row": torch.arange(4), "prompts": torch.tensor([[1, 2], [1, 2], [3, 4], [3, 4]])}
    scores = torch.tensor([[1.0], [1.0], [0.0], [1.0]])
    pairs = Batch(group=torch.tensor([5, 5, 6, 6]), scores=scores, **rows)
    assert signal_metrics(pairs) == {"reward/alike": 0.5, "training/same_prompts": 0.0}
    assert signal_metrics(pairs.with_(group=torch.arange(4)))["reward/alike"] == 0.0
    assert signal_metrics(pairs.with_(group=torch.arange(4), scores=scores[[0, 0, 0, 0]]))["reward/alike"] == 1.0
    one = pairs.with_(prompts=torch.ones(4, 2), extras={"images": [object()] * 4})
    assert "training/same_prompts" not in signal_metrics(one)  # their images differ


def test_a_constant_reward_is_said_once_in_the_log_and_in_the_summary_and_on_the_page(tmp_path, caplog):
    scored(tmp_path, "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n")
    (said,) = warnings_of(caplog, "the reward teaches nothing")
    assert said.startswith("step 3: in the last 3 steps all responses to a prompt scored alike (0.5 on average)")
    recorded = read_run(tmp_path / "run")
    assert any(line.startswith("Warning") and "scored alike" in line for line in summary_lines(recorded))
    assert "all responses to a prompt scored alike" in render([recorded])


def test_functions_that_all_return_none_are_told_with_a_row_and_as_the_cause(tmp_path, caplog):
    scored(tmp_path, "def compute_score(prompts, completions, **columns):\n    return [None] * len(completions)\n")
    (first,) = warnings_of(caplog, "every reward function returned None")
    assert "row " in first and "scores 0" in first
    (said,) = warnings_of(caplog, "the reward teaches nothing")
    assert "returned None for 8 responses of the last step" in said


def test_a_call_that_hangs_is_told_once_with_its_row_and_response(tmp_path, caplog):
    source = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str:  # the trial before training has no response
        time.sleep(60)
    return 0.0
"""
    own = "data.train_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size=1", "reward_model.timeout=0.2"
    found = scored(tmp_path, source, *own)
    (said,) = warnings_of(caplog, "took longer than 0.2 s")
    assert "row " in said and "response '" in said and "its process was killed" in said
    assert found[0]["reward/timeouts"] > 0
    assert "reward_model.timeout: raise it" in warnings_of(caplog, "the reward teaches nothing")[0]


def test_an_environment_that_cannot_pay_is_refused_unless_a_function_scores(tmp_path):
    (tmp_path / "games.py").write_text("""
import paddock
class Mute(paddock.Environment):
    def reset(self, row, seed):
        return "hello"
class Plain:
    def reset(self, **row):
        return "hello"
class Paid(Plain):
    def get_reward(self):
        return 1.0
""")
    score = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n"
    own = GRPO, "trainer.total_training_steps=1", SAVED_LAST, "data.val_files=null"
    for name in ("Mute", "Plain"):
        with pytest.raises(UserError, match="nothing pays") as refused:
            run(tmp_path / name, *own, f"environment={tmp_path}/games.py:{name}")
        assert refused.value.key == "environment" and "paddock.Turn(reward=...)" in str(refused.value)
    run(tmp_path / "paid", *own, f"environment={tmp_path}/games.py:Paid")
    (tmp_path / "r.py").write_text(score)
    function = f"custom_reward_function.path={tmp_path}/r.py"
    run(tmp_path / "scored", *own, f"environment={tmp_path}/games.py:Mute", function)


PRINTS = """
import subprocess

def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("scored", solution_str)
    subprocess.run(["echo", "a program"])
    return float(len(solution_str))
"""


def test_what_reward_functions_print_is_in_the_run_folder_and_the_log_says_so_once(tmp_path, caplog, capfd):
    scored(tmp_path, PRINTS, "trainer.total_training_steps=2")
    assert "scored" not in "".join(capfd.readouterr())
    lines = (tmp_path / "run/reward.log").read_text().splitlines()
    assert {line.split(" ")[0] for line in lines} == {"scored", "a"}
    assert sum(line.startswith("scored") for line in lines) == 1 + 2 * 4 * 2  # one was a trial
    assert warnings_of(caplog, "reward functions print") == [
        f"reward functions print: what they print is in {tmp_path / 'run/reward.log'}"
    ]


def test_a_run_whose_reward_functions_print_nothing_has_no_file_for_it(tmp_path, caplog):
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str)\n"
    scored(tmp_path, source, "trainer.total_training_steps=1")
    assert not (tmp_path / "run/reward.log").exists() and not warnings_of(caplog, "print")
