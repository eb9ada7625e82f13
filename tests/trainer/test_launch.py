"""run.json: a run folder knows its settings, where they came from, and on what it was trained."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

from paddock.config import tree
from paddock.loading.load import load
from paddock.runs.record import record_launch, starts


def start(folder: Path, after_step: int, *keys: str) -> list[dict]:
    loaded = load([f"trainer.default_local_dir={folder}", *keys])
    record_launch(folder, tree.settings(loaded.config), "train", loaded.origins, "1 x cpu", after_step)
    return starts(folder)


def test_a_start_keeps_settings_origins_and_versions_but_no_names_of_people_or_machines(tmp_path):
    (found,) = start(tmp_path, 0, "algorithm.adv_estimator=grpo", "trainer.seed=7")
    assert found["settings"]["trainer.seed"] == 7 and found["origins"]["trainer.seed"] == "command line"
    assert found["origins"]["data.train_files"] == "embedded default"
    assert found["environment"]["device"] == "1 x cpu" and found["environment"]["torch"]
    text = json.dumps(found["environment"])
    assert socket.gethostname() not in text and f'"{getpass.getuser()}"' not in text


def test_a_resumed_run_that_changes_nothing_leaves_the_file_as_it_was(tmp_path):
    start(tmp_path, 0)
    before = (tmp_path / "run.json").read_bytes()
    start(tmp_path, 4)
    start(tmp_path, 6, "trainer.resume_mode=auto")
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_changed_setting_adds_a_start_and_a_start_whose_steps_are_gone_is_dropped(tmp_path):
    start(tmp_path, 0, "trainer.total_training_steps=10")
    found = start(tmp_path, 10, "trainer.total_training_steps=20")
    assert [entry["after_step"] for entry in found] == [0, 10]
    assert [entry["settings"]["trainer.total_training_steps"] for entry in found] == [10, 20]
    found = start(tmp_path, 8, "trainer.total_training_steps=30")  # went on from an older checkpoint
    assert [entry["after_step"] for entry in found] == [0, 8]
    assert len(start(tmp_path, 0, "trainer.seed=1")) == 1  # a new run in the same folder


def test_a_damaged_file_is_no_file(tmp_path):
    for text in ("", "[]", '{"starts": 3}', '{"starts": [1]}', "\x00"):
        (tmp_path / "run.json").write_text(text)
        assert starts(tmp_path) == []
        assert len(start(tmp_path, 5)) == 1
