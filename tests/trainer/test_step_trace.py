"""How far it is from a step to its formula: the calls that a reader follows, and the files that they are in."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from conftest import ROOT

from paddock.algorithms import losses
from paddock.cli import main
from paddock.loading.load import load
from paddock.trainer.loop import Trainer
from paddock.trainer.reinforcement import train

MOST_CALLS, MOST_FILES, MOST_CALLS_BEFORE = 6, 7, 7
KEYS = [
    "algorithm.adv_estimator=gae", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=1", "trainer.test_freq=-1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=1", "trainer.logger=[file]",
    "trainer.val_before_train=False", "trainer.save_last=False", "data.dataloader_num_workers=0",
]  # fmt: skip


def calls_since(module: str, function: str) -> list[tuple[str, str]]:
    """Returns our files and functions on the stack from this function on."""
    frame: FrameType | None = sys._getframe(2)
    path: list[tuple[str, str]] = []
    while frame is not None:
        name = str(frame.f_globals["__name__"])
        if name.startswith("paddock."):
            path.append((name, frame.f_code.co_name))
        frame = None if (name, frame.f_code.co_name) == (module, function) else frame.f_back
    return path[::-1]


def call_path(tmp_path: Path, monkeypatch: Any) -> list[tuple[str, str]]:
    """Runs one PPO step; returns our files and functions from `Trainer.step` to the policy loss, as they are called."""
    paths: list[list[tuple[str, str]]] = []
    formula = losses.policy_loss_terms

    def traced(*args: Any, **kwargs: Any) -> Any:
        paths.append([*calls_since("paddock.trainer.loop", "step"), (losses.__name__, "policy_loss_terms")])
        return formula(*args, **kwargs)

    monkeypatch.setattr("paddock.workers.policy.policy_loss_terms", traced)
    assert train(load([*KEYS, f"trainer.default_local_dir={tmp_path}"]).config).finished
    return paths[0]


def test_from_a_step_to_the_policy_loss_are_at_most_six_calls(tmp_path, monkeypatch):
    path = call_path(tmp_path, monkeypatch)
    assert path[0] == ("paddock.trainer.loop", "step") and path[-1][1] == "policy_loss_terms"
    assert len(path) - 1 <= MOST_CALLS, path


def test_the_reading_path_of_the_docs_names_the_files_of_these_calls(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("## One step, file by file", 1)[1].split("\n## ", 1)[0]
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)
    called = {name.replace(".", "/") + ".py" for name, _ in call_path(tmp_path, monkeypatch)}
    assert len(listed) <= MOST_FILES and called <= {f"paddock/{path}" for path in listed}, (listed, called)


def test_from_the_command_to_a_step_are_at_most_seven_calls(tmp_path, monkeypatch):
    paths, step = [], Trainer.step

    def traced(self: Trainer) -> Any:
        paths.append(calls_since("paddock.cli", "main"))
        return step(self)

    monkeypatch.setattr(Trainer, "step", traced)
    assert main(["train", *KEYS, f"trainer.default_local_dir={tmp_path}"]) == 0
    assert paths[0][0] == ("paddock.cli", "main") and len(paths[0]) <= MOST_CALLS_BEFORE, paths[0]
