"""Conversations over several processes: each rank drives those of its engine, and the run is that of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from devices import ON_DEVICE

pytest.importorskip("ray")

GAME = """
import paddock

class Twice(paddock.Environment):
    def step(self, answer):
        return "+1=" if answer.number == 0 else paddock.Turn(reward=float(len(answer.tokens)), done=True)
"""


def train(folder, devices: int, environment: str, *settings: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable, "-m", "paddock.cli", "train", f"environment={environment}", "algorithm.adv_estimator=grpo",
        *ON_DEVICE, f"trainer.n_gpus_per_node={devices}", "data.train_batch_size=4", "data.val_max_samples=4",
        "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2", "trainer.logger=[file]",
        "data.max_response_length=24", "actor_rollout_ref.rollout.deterministic=True",
        f"trainer.rollout_data_dir={folder}/dumps", f"trainer.default_local_dir={folder}/run", *settings,
    ]  # fmt: skip
    environment_ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment_, capture_output=True, text=True, timeout=400)


def test_ranks_hold_the_conversations_of_one_process(tmp_path):
    found = []
    for devices in (1, 2):
        folder = tmp_path / str(devices)
        folder.mkdir()
        (folder / "game.py").write_text(GAME)
        done = train(folder, devices, f"{folder}/game.py:Twice")
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in (folder / "dumps/1.jsonl").read_text().splitlines()]
        told = [(line["group"], json.dumps(line["extras"]["conversation"]), line["score"]) for line in lines]
        found.append(sorted(told))
    assert found[0] == found[1] and len(found[0]) == 8


def test_a_class_of_the_program_is_refused_where_other_processes_would_need_it(tmp_path):
    done = train(tmp_path, 2, "python:Mine")
    assert done.returncode == 2 and "put it into a module or a file" in done.stderr
    assert "Traceback" not in done.stderr
