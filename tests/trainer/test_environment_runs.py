"""Whole runs in environments: one turn is the plain run, a resumed run is the uninterrupted one, dumps hold talks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paddock
from paddock import Run

SMALL: dict[str, Any] = {"n": 2, "batch": 4, "steps": 2, "logger": ["file"], "save_every": 1}
QUIET = {"data.val_files": None}


class OneTurn(paddock.Environment):
    """Ends with the first turn, and nobody knows before."""

    inline = True

    def step(self, answer):
        return None


class Told(OneTurn):
    max_turns = 1


class InThreads(paddock.Environment):
    def reset(self, row, seed):
        return None

    def step(self, answer):
        return None


class Twice(paddock.Environment):
    """Asks once more, and pays for the length of the second answer."""

    def step(self, answer):
        return "+1=" if answer.number == 0 else paddock.Turn(reward=float(len(answer.tokens)), done=True)


def weights(folder: Path, step: int = 2) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted((folder / f"global_step_{step}").rglob("*.safetensors")):
        found |= {f"{path.parent.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return found


def trained(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    keys = {**QUIET, **changes.pop("config", {})}
    with Run(folder=str(folder), config=keys, **{**SMALL, **changes}) as run:
        assert run.train().finished
    return weights(folder)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [("grpo", "embedded"), ("ppo", "hf"), pytest.param("rloo", "embedded", marks=pytest.mark.slow)],
)
def test_an_environment_of_one_turn_is_the_plain_run_bit_for_bit(algorithm, engine, tmp_path):
    how = {"algorithm": algorithm, "engine": engine}
    data = {"data.train_files": "builtin:addition/train", "actor_rollout_ref.model.path": "builtin:tiny",
            "data.max_prompt_length": 16, "data.max_response_length": 8, "trainer.device": "cpu"}  # fmt: skip
    plain = trained(tmp_path / "plain", config=data, **how)
    for environment in (OneTurn, Told):
        own = trained(tmp_path / environment.__name__, environment=environment, config=data, **how)
        assert equal(own, plain)
    if algorithm == "grpo":
        threads = {**data, "actor_rollout_ref.rollout.deterministic": True}
        assert equal(trained(tmp_path / "threads", environment=InThreads, config=threads, **how), plain)


def test_a_resumed_run_of_several_turns_is_the_uninterrupted_one(tmp_path):
    keys = {"config": {"actor_rollout_ref.rollout.deterministic": True}, "environment": Twice, "response_length": 24}
    whole = trained(tmp_path / "whole", **keys)
    with Run(folder=str(tmp_path / "cut"), **{**SMALL, **keys, "config": {**QUIET, **keys["config"]}}) as run:
        next(iter(run))
    assert equal(trained(tmp_path / "cut", **keys), whole)


def test_metrics_samples_and_dumps_tell_of_turns(tmp_path):
    keys = {"trainer.rollout_data_dir": str(tmp_path / "dumps"), "data.val_max_samples": 8,
            "trainer.validation_data_dir": str(tmp_path / "val"), "data.max_response_length": 24}  # fmt: skip
    with Run(environment=Twice, folder=str(tmp_path / "run"), config=keys, **{**SMALL, "steps": 1}) as run:
        run.train()
    first = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = next(line for line in first if line["step"] == 1)
    assert found["num_turns/mean"] == 4.0 and found["tool_call_counts/max"] == 0.0
    assert found["environment/ended/done"] + found.get("environment/ended/length", 0.0) == 1.0
    assert found["response_length/mean"] < found["response_length_with_environment/mean"]
    for path in ("dumps/1.jsonl", "val/1.jsonl"):
        for line in (tmp_path / path).read_text().splitlines():
            sample = json.loads(line)
            said = sample["extras"]["conversation"]
            assert [turn["role"] for turn in said[:3]] == ["assistant", "user", "assistant"]
            assert said[1]["content"] == "+1=" and sample["extras"]["num_turns"] == 4


def test_what_an_environment_writes_reaches_no_loss_and_no_penalty(tmp_path):
    """A word that the environment never said changes no gradient: only what it conditions changes."""
    with Run(environment=Twice, folder=str(tmp_path), config=QUIET, response_length=24, **SMALL) as run:
        batch = run.advantages(run.score(run.sample()))
        said = (batch.need("versions") == -1) & (torch.arange(batch.need("mask").shape[1]) < batch.lengths[:, None])
        assert said.any() and (batch.need("mask")[said] == 0).all()
        for column in ("advantages", "scores", "rewards", "old_log_probs"):
            assert (batch.need(column)[said] == 0).all(), column
        noisy = batch.with_(
            advantages=batch.advantages.masked_fill(said, 99.0), old_log_probs=batch.old_log_probs.masked_fill(said, -9)
        )
        metrics = run.learn(noisy)
        once = weights(Path(run.save().folder).parent, run.save().step)
    with Run(environment=Twice, folder=str(tmp_path / "clean"), config=QUIET, response_length=24, **SMALL) as run:
        batch = run.advantages(run.score(run.sample()))
        clean = run.learn(batch)
        assert equal(once, weights(Path(run.save().folder).parent, run.save().step))
    for name in ("actor/pg_loss", "actor/entropy", "actor/ppo_kl", "actor/grad_norm"):
        assert metrics.get(name) == clean.get(name)


def test_a_conversation_of_messages_is_learnt_turn_by_turn(tmp_path):
    talk = [{"role": "user", "content": "2*3="}, {"role": "assistant", "content": "[mul(a=2, b=3)]"},
            {"role": "tool", "content": "6="}, {"role": "assistant", "content": "6"}]  # fmt: skip
    rows = [{"messages": talk}] * 4
    keys = {"actor_rollout_ref.model.path": "builtin:tiny", "data.max_prompt_length": 16}
    with Run(data=rows, algorithm="sft", folder=str(tmp_path), config={**QUIET, **keys}, batch=4, steps=1,
             response_length=32, logger=["file"]) as run:  # fmt: skip
        (step,) = iter(run)
    words = run.config and [turn["content"] for turn in talk]
    batch = step.batch
    own = (batch.need("mask") != 0).sum(-1).tolist()
    assert own == [len(words[1]) + 1 + len(words[3]) + 1] * 4
    assert batch.need("lengths").tolist() == [count + len(words[2]) for count in own]


TRL = """
class Counter:
    def reset(self, **row):
        self.count = 0
        return None

    def add(self, amount: int) -> str:
        '''
        Adds to the counter.

        Args:
            amount: how much
        '''
        self.count += amount
        return str(self.count)


def counted(completions, environments, **columns):
    return [float(environment.count) + len(turns) for environment, turns in zip(environments, completions)]


def held(environments, **kwargs):
    return [environment.count + 0.5 for environment in environments]
"""


def test_a_class_and_a_reward_function_of_trls_contract_run_as_they_are(tmp_path):
    (tmp_path / "theirs.py").write_text(TRL)
    keys = {"data.train_files": "builtin:products/train", "actor_rollout_ref.model.path": "builtin:tiny",
            "custom_reward_function.path": [f"{tmp_path}/theirs.py:{name}" for name in ("counted", "held")],
            "trainer.device": "cpu",
            "data.max_prompt_length": 16, "actor_rollout_ref.rollout.dtype": "float32"}  # fmt: skip
    with Run(environment=f"{tmp_path}/theirs.py:Counter", folder=str(tmp_path / "run"), config={**QUIET, **keys},
             response_length=16, **{**SMALL, "steps": 1}) as run:  # fmt: skip
        (step,) = iter(run)
    for sample in step.samples:  # a plain text is completed by a text
        assert sample.extras["counted"] == float(len(sample.answer)) and "environment" not in sample.extras
        assert sample.extras["held"] == 0.5 and "completion" not in sample.extras
