"""`Run`: what a program writes instead of a command, and that it is the same run."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import importable_rewards
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import paddock
from paddock import Run, UserError
from paddock.commands.keys_of import SFT
from paddock.loading.load import load
from paddock.trainer.reinforcement import train
from paddock.trainer.supervised import FINE_TUNING

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
SMALL: dict[str, Any] = {"n": 4, "batch": 4, "steps": 2, "logger": ["file"], "prompt_length": 8, "response_length": 6}


def rows_and_reward(folder: Path, data: Any = ROWS, reward: Any = None, **changes: Any) -> Run:
    own = reward or (lambda completion, answer: float(answer in completion))
    return Run(data=data, reward=own, **{**SMALL, "folder": str(folder), **changes})


def weights(folder: Path, step: int = 2) -> dict[str, torch.Tensor]:
    return load_file(next((folder / f"global_step_{step}").rglob("*.safetensors")))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_importing_paddock_imports_nothing_heavy():
    code = (
        "import sys, paddock; print(sorted({'torch', 'numpy', 'omegaconf', 'rich', 'transformers'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert {"Run", "estimator", "scorer"} <= {*dir(paddock)}


ADDITION = [
    "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2",
    "data.val_max_samples=4", "trainer.logger=[file]", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
]  # fmt: skip


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_command_and_the_library_give_the_same_bits(algorithm, tmp_path):
    estimator = "gae" if algorithm == "ppo" else algorithm
    line = [*ADDITION, f"algorithm.adv_estimator={estimator}", f"trainer.default_local_dir={tmp_path / 'line'}"]
    assert train(load(line).config).finished
    with Run(
        algorithm=algorithm, batch=4, n=2, steps=2, logger=["file"], mini_batch=4, folder=str(tmp_path / "run"),
        config={"data.val_max_samples": 4},
    ) as run:  # fmt: skip
        assert run.train().finished
    assert equal(weights(tmp_path / "line"), weights(tmp_path / "run"))


def test_supervised_training_gives_the_bits_of_the_command(tmp_path):
    line = ["data.train_batch_size=4", "trainer.total_training_steps=2", "trainer.logger=[file]"]
    assert FINE_TUNING.train(SFT.load([*line, f"trainer.default_local_dir={tmp_path / 'line'}"]).config).finished
    with Run(algorithm="sft", batch=4, steps=2, logger=["file"], folder=str(tmp_path / "run")) as run:
        assert [step.number for step in run] == [1, 2]
        with pytest.raises(UserError, match="draws no responses"):
            run.generate("1+1=")
    assert equal(weights(tmp_path / "line"), weights(tmp_path / "run"))


def test_steps_and_a_loop_of_ones_own_give_the_bits_of_train(tmp_path):
    with rows_and_reward(tmp_path / "train") as run:
        assert run.train().finished
    with rows_and_reward(tmp_path / "steps") as run:
        steps = list(run)
    with rows_and_reward(tmp_path / "own") as run:
        for _ in range(2):
            batch = run.advantages(run.score(run.sample()))
            metrics = run.learn(batch)
            run.sync()
    assert [step.number for step in steps] == [1, 2] and len(steps[0].samples) == 16
    assert metrics["actor/grad_norm"] == steps[1].metrics["actor/grad_norm"]
    for name in ("steps", "own"):
        assert equal(weights(tmp_path / "train"), weights(tmp_path / name)), name


def test_rows_may_be_objects_of_any_kind(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    import datasets
    import pandas
    import pyarrow

    frame = pandas.DataFrame(ROWS)
    (tmp_path / "rows.jsonl").write_text(frame.to_json(orient="records", lines=True))
    kinds = [ROWS, frame, pyarrow.Table.from_pylist(ROWS), datasets.Dataset.from_list(ROWS), tmp_path / "rows.jsonl"]
    found = []
    for number, data in enumerate(kinds):
        with rows_and_reward(tmp_path / str(number), data, steps=1) as run:
            found.append(next(iter(run)).metrics["actor/pg_loss"])
    assert found == found[:1] * 5


def test_every_shape_of_reward_gives_the_same_scores(tmp_path):
    held = threading.Lock()  # cannot be pickled

    class Scorer:
        def __call__(self, completion: str, answer: str, **row: Any) -> float:
            with held:
                return float(answer in completion and row["prompt"] is not None)

    async def awaited(completion: str, ground_truth: str) -> float:
        return float(ground_truth in completion)

    imported = [importable_rewards.fields, importable_rewards.row, importable_rewards.columns]
    copies = [types.FunctionType(one.__code__, vars(importable_rewards), "copy") for one in imported]
    rewards = [*imported, *copies, Scorer(), awaited, "contains", {imported[0]: 0.5, "contains": 0.5}]
    found, own = [], []
    for number, reward in enumerate(rewards):
        parts = {"reward_kwargs": {"whole_words": False}} if number >= 8 else {}
        with rows_and_reward(tmp_path / str(number), reward=reward, config=parts) as run:
            own.append(len(run.functions))
            found.append(run.score(run.sample()).scores.sum(-1).tolist())
    assert own == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]  # the others are imported by processes
    assert sum(found[0]) > 0 and all(scores == found[0] for scores in found[1:])


def test_a_registered_scorer_is_a_reward_by_name(tmp_path):
    @paddock.scorer("short")
    def short(completion: str) -> float:
        return -float(len(completion))

    with Run(data=ROWS, reward="short", **SMALL, folder=str(tmp_path)) as run:
        episodes = run.sample()
        scores = run.score(episodes).scores.sum(-1).tolist()
    assert scores == [-float(len(episode.text)) for episode in episodes]


def test_a_function_that_asks_for_a_column_that_is_not_there_is_refused(tmp_path):
    def reward(completion: str, truth: str) -> float:
        return 0.0

    with (
        Run(data=ROWS, reward=reward, **SMALL, folder=str(tmp_path)) as run,
        pytest.raises(UserError, match=r"takes 'truth', and nothing that it is given is called so; it may name c"),
    ):
        run.train()


def test_a_function_that_takes_too_long_counts_as_cut_off_and_the_log_says_so(tmp_path, caplog):
    ends = threading.Event()

    def slow(completion: str, answer: str) -> float:
        if answer == "0":
            ends.wait(20)
        return 1.0

    with Run(data=ROWS[:4], reward=slow, **{**SMALL, "steps": 1, "reward_timeout": 0.5}, folder=str(tmp_path)) as run:
        caplog.set_level(logging.INFO, "paddock")
        with pytest.raises(UserError, match=r"took longer than 0.5 s"):
            run.train()
    ends.set()
    assert "cannot be killed" in caplog.text


@pytest.mark.parametrize(
    ("made", "typed"),
    [
        ({"config": {"trainer.sede": 1}}, ["trainer.sede=1"]),
        ({"batch": 0}, ["data.train_batch_size=0"]),
        ({"algorithm": "grop"}, ["algorithm.adv_estimator=grop"]),
        ({"lr": "fast"}, ["actor_rollout_ref.actor.optim.lr=fast"]),
        ({"model": "/nowhere"}, ["actor_rollout_ref.model.path=/nowhere", "algorithm.adv_estimator=grpo"]),
    ],
)
def test_a_bad_argument_has_the_text_of_the_command(made, typed):
    from paddock.commands.preflight import check

    with pytest.raises(UserError) as line:
        check(load(typed).config)
    with pytest.raises(UserError) as program:
        Run(**made).open()
    assert str(program.value) == str(line.value)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"lrr": 1.0}, "did you mean 'lr'"),
        ({"data": []}, "holds no rows"),
        ({"data": [1]}, "row 0 is a int"),
        ({"data": 3}, "a list of dicts"),
        ({"data": ROWS, "reward": [3]}, "is no reward"),
        ({"lr": 1.0, "config": {"actor_rollout_ref.actor.optim.lr": 2.0}}, "is set by lr= as well"),
    ],
)
def test_an_argument_of_no_command_is_refused_with_a_reason(made, reason):
    with pytest.raises(UserError, match=reason):
        Run(**made)


def surroundings() -> list[Any]:
    return [
        random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
        torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
        signal.getsignal(signal.SIGINT), logging.getLogger().handlers[:],
        logging.getLogger("paddock").level, {name for name in sys.modules if name.startswith("paddock_")}, sys.path[:],
        {name: value for name, value in os.environ.items() if name.startswith(("CUBLAS", "VLLM", "OMP"))},
    ]  # fmt: skip


def test_a_run_leaves_nothing_behind_and_two_at_a_time_have_the_bits_of_one(tmp_path):
    before = surroundings()
    with rows_and_reward(
        tmp_path / "alone", seed=3, config={"actor_rollout_ref.actor.fsdp_config.full_determinism": True}
    ) as run:
        assert run.train().finished
    assert surroundings() == before
    one, other = rows_and_reward(tmp_path / "one", seed=3), rows_and_reward(tmp_path / "other", seed=4)
    for first, second in zip(one, other, strict=True):
        torch.rand(3), random.random()
        assert first.number == second.number
    one.close(), other.close()
    assert equal(weights(tmp_path / "alone"), weights(tmp_path / "one"))
    assert not equal(weights(tmp_path / "alone"), weights(tmp_path / "other"))


def test_the_same_lines_go_on_after_ctrl_c_and_begin_anew_once_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def in_answer(completion: str, answer: str) -> float:
        return float(answer in completion)

    def lines(steps: int, on_step=None) -> Run:
        return Run(data=ROWS, reward=in_answer, **{**SMALL, "steps": steps}, on_step=on_step)

    with lines(3, lambda step: os.kill(os.getpid(), signal.SIGINT) if step.number == 1 else None) as run:
        outcome = run.train()
    assert not outcome.finished and outcome.checkpoint.step == 1
    with lines(3) as run:
        outcome = run.train()
        assert outcome.finished and outcome.trained == 2
        folder = run.folder
    whole = rows_and_reward(tmp_path / "whole", reward=in_answer, steps=3)
    whole.train()
    whole.close()
    assert equal(weights(folder, 3), weights(tmp_path / "whole", 3))
    with lines(3) as run:
        run.open()
        assert run.folder.name == f"{folder.name}-2"


def test_listeners_hear_of_steps_checkpoints_and_validations(tmp_path):
    heard: list[Any] = []
    with rows_and_reward(
        tmp_path, validation=ROWS[:4], validate_every=2, on_step=lambda step: heard.append(step.number),
        on_save=lambda checkpoint: heard.append(checkpoint.folder.name),
        on_validation=lambda step, metrics: heard.append((step, len(metrics) > 0)),
    ) as run:  # fmt: skip
        run.train()
    assert heard == [(0, True), 1, (2, True), "global_step_2", 2]


def test_a_run_that_was_exported_before_its_first_step_goes_on(tmp_path):
    with paddock.Run(**{**SMALL, "folder": tmp_path / "run"}) as run:
        run.export(tmp_path / "model")
    with paddock.Run(**{**SMALL, "folder": tmp_path / "run"}) as run:
        assert run.train().trained == 2


def test_what_is_trained_is_evaluated_asked_exported_and_reported(tmp_path):
    with rows_and_reward(tmp_path / "run") as run:
        run.train()
        assert len(run.generate("1+1=", n=3)) == 3 and len(run.generate(["1+1=", "2+2="])) == 2
        assert set(run.evaluate(ROWS[:4])) >= {"val-core/data/reward/mean@1"}
        assert (run.export(tmp_path / "model") / "config.json").is_file()
        assert run.report().stat().st_size > 10_000
        assert "Algorithm: grpo" in str(run.plan())
        with pytest.raises(UserError, match="no rows to evaluate on"):
            run.evaluate()


def test_in_an_environment_a_prompt_is_answered_by_a_conversation(tmp_path):
    with paddock.Run(
        "builtin:tiny-tools", environment="builtin:calculator", folder=tmp_path, n=2, batch=2, steps=1,
        response_length=40, config={"trainer.val_before_train": False},
    ) as run:  # fmt: skip
        told = run.generate(["37*48=", "12*34="], n=8)
        assert [len(responses) for responses in told] == [8, 8]
        assert any("[tool: 1776=]" in text for text in told[0]) and any("[tool: 408=]" in text for text in told[1])


def test_memory_comes_back_when_a_run_is_closed(tmp_path):
    import gc
    import weakref

    run = rows_and_reward(tmp_path)
    run.train()
    model = weakref.ref(run.open().opened().roles.actor.engine.model)
    assert model() is not None
    run.close()
    gc.collect()
    deadline = time.monotonic() + 5
    while model() is not None and time.monotonic() < deadline:
        gc.collect()
    assert model() is None


def test_the_same_cell_again_goes_on_in_the_folder_of_the_run_that_it_left_open(tmp_path, caplog):
    left = rows_and_reward(tmp_path, steps=3, save_every=1)
    steps = iter(left)
    assert next(steps).number == 1
    with rows_and_reward(tmp_path, steps=3, save_every=1) as again:
        assert [step.number for step in again] == [2, 3]
    assert left.training is None and f"closed the earlier run in {tmp_path}, which was idle" in caplog.text


def test_a_run_that_trains_keeps_its_folder_from_another_one(tmp_path):
    refused: list[str] = []

    def second(step: Any) -> None:
        with pytest.raises(UserError, match="another run is writing here") as caught:
            rows_and_reward(tmp_path).open()
        refused.append(caught.value.reason)

    with rows_and_reward(tmp_path, on_step=second) as first:
        first.train()
    assert len(refused) == 2

    idle = rows_and_reward(tmp_path, steps=3)
    next(iter(idle))
    elsewhere = threading.Thread(target=second, args=(None,))
    elsewhere.start()
    elsewhere.join()
    idle.close()
    assert len(refused) == 3


def test_a_step_and_a_plan_show_themselves_in_short(tmp_path):
    with rows_and_reward(tmp_path) as run:
        step = next(iter(run))
        plan = run.plan()
    reward, length = (f"{step.metrics[name]:.3g}" for name in ("critic/score/mean", "response_length/mean"))
    assert repr(step) == f"Step(1, reward {reward}, length {length})"
    assert repr(plan) == str(plan) and "Config(" not in repr(plan)
    assert plan._repr_html_().startswith("<pre>") and "&lt;" not in str(plan)
