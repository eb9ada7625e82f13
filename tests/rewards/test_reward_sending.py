"""Functions of the program that runs are sent to processes; a thread has those that cannot be."""

from __future__ import annotations

import logging
import os
import runpy
import sys
import tempfile
import threading
import time

import pytest
import torch

from paddock.errors import UserError
from paddock.loading.load import load
from paddock.rewards.manager import RewardManager
from paddock.rewards.score import ScoreRequest
from paddock.trainer.assembly import open_rewards
from tests.forked import ForkedCall

REQUEST = ScoreRequest("mine", "The answer is $\\frac{1}{2}$.", "0.5", {}, "a.parquet row 0", prompt="1/2=")
HERE = os.getpid()
factor = 1.0


@pytest.fixture
def manager():
    made = []

    def make(function, *settings: str) -> RewardManager:
        config = load(["custom_reward_function.path=python:f", "reward_model.num_workers=1", *settings]).config
        made.append(open_rewards(config, {"f": function}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def cosine_scaled(least: float):
    """A closure, as open-r1 makes its rewards."""
    from math_verify import parse, verify

    def reward(completions, answer, **columns):
        found = [verify(parse(f"${truth}$"), parse(text)) for text, truth in zip(completions, answer, strict=True)]
        return [least + right for right in found]

    return reward


def test_a_closure_that_needs_a_main_thread_runs_in_one(manager):
    bound = cosine_scaled(0.25)
    rewards = manager(bound)
    rewards.check([REQUEST])
    assert [score.value for score in rewards.score([REQUEST])] == [1.25] and rewards.parts[0].here is None


def test_files_of_functions_go_with_the_manager_and_none_is_made_for_rules(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_rewards(load([]).config) as rewards:
        rewards.score([ScoreRequest("openai/gsm8k", "#### 5", "5")])
        assert not [*tmp_path.iterdir()]
    config = load(["custom_reward_function.path=python:f", "reward_model.num_workers=1"]).config
    with open_rewards(config, {"f": lambda completion: 1.0}) as rewards:
        rewards.score([REQUEST])
        assert [path.name.startswith("paddock-functions-") for path in tmp_path.iterdir()] == [True]
    assert not [*tmp_path.iterdir()]


def test_a_call_that_takes_too_long_is_killed(manager):
    def hangs(completion):
        while True:
            time.sleep(0.1) if completion else None

    rewards = manager(hangs, "reward_model.timeout=0.5")
    (score,) = rewards.score([REQUEST])
    assert score.timed_out and rewards.threads.thread is None


def test_a_batch_sees_what_the_program_has_when_it_begins_and_the_program_nothing_of_what_is_changed(manager):
    calls: list[int] = []

    def scaled(completion):
        calls.append(1)
        return factor + len(calls) / 8

    global factor
    rewards = manager(scaled)
    first = [score.value for score in rewards.score([REQUEST, REQUEST])]
    factor = 3.0
    second = [score.value for score in rewards.score([REQUEST])]
    factor = 1.0
    assert (first, second, calls) == ([1.125, 1.25], [3.125], [])


HELD = {
    "lock": (threading.Lock(), "cannot pickle '_thread.lock' object"),
    "model": (torch.nn.Linear(1, 1), "a model stays in its process"),
    "much": (bytes(65 << 20), "takes more than 64 MiB"),
}


@pytest.mark.parametrize("name", HELD)
def test_a_function_that_cannot_be_sent_runs_in_a_thread_and_messages_say_why(manager, caplog, name):
    held, why = HELD[name]

    def reward(completion):
        assert held is not None and os.getpid() == HERE
        return 1.0 if completion else None

    rewards = manager(reward)
    caplog.set_level(logging.INFO, "paddock")
    assert [score.value for score in rewards.score([REQUEST])] == [1.0]
    why = f"cannot be sent to a process: it reads 'held': {why}"
    assert f"the reward f runs in a thread of this program, since it {why}" in caplog.text
    with pytest.raises(UserError, match="returned None") as error:
        rewards.score([ScoreRequest("mine", "", "1")])
    assert "a finite number" in error.value.fix and f"It runs in a thread, as it {why}" in error.value.fix


def test_what_no_process_can_load_runs_in_a_thread(manager, monkeypatch):
    module = type(os)("made_here")
    exec("def one(text): return 1.0", module.__dict__)
    module.one.__module__ = "made_here"
    monkeypatch.setitem(sys.modules, "made_here", module)
    rewards = manager(lambda completion: module.one(completion))
    assert [score.value for score in rewards.score([REQUEST])] == [1.0]
    assert "No module named 'made_here'" in rewards.parts[0].here


SCRIPT = """
import os
import paddock
from math_verify import parse, verify

calls = []

def accuracy(completion: str, answer: str) -> float:
    calls.append(os.getpid())
    assert len(calls) == 1 or os.getpid() != HERE
    return float(verify(parse(f"${answer}$"), parse(completion or "$0.5$")))

def make(pay):
    def paid(prompts, completions, **columns):
        return [pay * verify(parse("$2$"), parse("$\\\\frac42$")) for _ in completions]
    return paid

HERE = os.getpid()
rows = [{"prompt": "1/2=", "answer": "0.5"}]
small = dict(batch=1, n=2, response_length=2, steps=1, logger=["file"])
with paddock.Run("builtin:tiny", rows * 2, {accuracy: 1.0, make(0.5): 1.0}, **small) as run:
    print(run.train().finished, calls)

def accuracy(completion: str, answer: str) -> float:
    return 7.0

with paddock.Run("builtin:tiny", rows * 2, accuracy, **small) as run:
    print(run.score(run.sample()).scores.sum(-1).tolist())
"""


def test_math_verify_works_in_a_script_of_ones_own_and_a_function_that_is_defined_again_is_the_new_one(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    process = ForkedCall(lambda: runpy.run_path("script.py", run_name="__main__") and None, folder=tmp_path)
    assert process.wait() == 0, process.said()
    lines = process.said().splitlines()
    assert [line for line in lines if line.endswith("]")][-2:] == ["True []", "[7.0, 7.0]"]
    assert "thread" not in process.said()
