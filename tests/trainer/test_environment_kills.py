"""A run that is killed while a tool runs: nothing is lost or trained twice, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.forked import Forked

ENVIRONMENT = """
import pathlib, time
import paddock

class Slow(paddock.Environment):
    def step(self, answer):
        if answer.number == 0:
            pathlib.Path("in_a_tool").touch()
            time.sleep(0.05)
            return "+1="
        return paddock.Turn(reward=float(len(answer.tokens)), done=True)
"""


def started(folder: Path, *settings: str) -> Forked:
    (folder / "slow.py").write_text(ENVIRONMENT)
    arguments = [
        "train", "environment=slow.py:Slow", "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=4",
        "trainer.save_freq=1", "data.val_files=null", "trainer.logger=[file]", "data.max_response_length=24",
        "actor_rollout_ref.rollout.deterministic=True", "trainer.rollout_data_dir=dumps",
        "trainer.default_local_dir=run", *settings,
    ]  # fmt: skip
    return Forked(arguments, folder=folder)


def wait_for(path: Path, process: Forked) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)


def dumped(folder: Path) -> dict[int, list[tuple[int, str]]]:
    found = {}
    for path in sorted((folder / "dumps").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[int(path.stem)] = [(line["group"], json.dumps(line["extras"]["conversation"])) for line in lines]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    assert started(folder).wait() == 0
    return folder


@pytest.mark.parametrize("step", [0, 2])
def test_a_run_killed_while_a_tool_runs_goes_on_as_if_nothing_had_happened(step, whole, tmp_path):
    cut = tmp_path / "cut"
    cut.mkdir()
    process = started(cut)
    if step:
        wait_for(cut / f"run/global_step_{step}", process)
        (cut / "in_a_tool").unlink(missing_ok=True)
    wait_for(cut / "in_a_tool", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert started(cut).wait() == 0
    assert dumped(cut) == dumped(whole)
    groups = [group for rows in dumped(whole).values() for group, _ in rows]
    assert len(groups) == 32 and all(groups.count(group) == 2 for group in groups)
    files = [next((folder / "run/global_step_4").rglob("*.safetensors")) for folder in (whole, cut)]
    one, other = map(load_file, files)
    assert all((one[name] == other[name]).all() for name in one)
