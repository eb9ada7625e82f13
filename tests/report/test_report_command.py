"""`paddock report`, and the end of every command that trains: a summary, a page, and no failure because of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from synthetic import write_run

from paddock.cli import main

SMALL = [
    "data.train_batch_size=8", "trainer.total_training_steps=2", "trainer.logger=[file]", "trainer.test_freq=1",
    "data.dataloader_num_workers=0",
]  # fmt: skip
RL = [
    *SMALL, "algorithm.adv_estimator=grpo", "data.val_max_samples=16", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
]  # fmt: skip


def data_of(page: Path) -> dict:
    text = page.read_text()
    return json.loads(text.split('id="data">', 1)[1].split("</script>", 1)[0])


def test_one_run_gets_its_page_in_its_folder_and_several_where_out_says(tmp_path, capsys, monkeypatch):
    for name in ("a", "b"):
        write_run(tmp_path / name, settings=None)
    assert main(["report", str(tmp_path / "a")]) == 0
    assert str(tmp_path / "a" / "report.html") in capsys.readouterr().out
    assert data_of(tmp_path / "a" / "report.html")["title"] == "a"
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "new" / "both.html")]) == 0
    assert [curve["label"] for curve in data_of(tmp_path / "new" / "both.html")["curves"]] == ["a", "b"]
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a", "b"]) == 0 and (tmp_path / "report.html").is_file()
    assert not (tmp_path / "b" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: RUN"),
        (["nowhere"], "no such folder"),
        (["run", "--wide"], "unrecognized arguments: --wide"),
        (["run", "run/."], "is named twice"),
        (["run", "--out", "."], "is a folder"),
        (["run", "--out", "run/metrics.jsonl/x.html"], "cannot be written"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(tmp_path, monkeypatch, capsys, arguments, said):
    write_run(tmp_path / "run", settings=None)
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["metrics.jsonl", "samples.jsonl"]


def test_a_report_imports_no_torch(tmp_path):
    write_run(tmp_path / "run")
    script = f"""
import sys
from paddock.cli import main
assert main(["report", {str(tmp_path / "run")!r}]) == 0
assert not {{"torch", "transformers", "ray"}} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, env=environment)


def test_a_training_run_ends_with_a_summary_and_a_page_with_its_samples_and_settings(tmp_path, capsys):
    assert main(["train", *RL, f"trainer.default_local_dir={tmp_path}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Held-out accuracy  ") and " -> " in said[0]
    assert said[1].startswith("Reward ") and said[2].startswith("Time of steps ")
    assert said[3] == f"The report is in {tmp_path}/report.html"
    data = data_of(tmp_path / "report.html")
    (samples,) = data["samples"]
    assert [(line["step"], line["source"]) for line in samples["lines"]] == [
        (0, "validation"), (1, "rollout"), (1, "validation"), (2, "rollout"), (2, "validation")
    ]  # fmt: skip
    early, late = (samples["lines"][i]["samples"] for i in (0, -1))
    assert [one["prompt"] for one in early] == [one["prompt"] for one in late]
    assert {one["score"] for one in early} <= {0.0, 1.0}
    (config,) = data["configs"]
    assert config["settings"]["trainer.total_training_steps"] == ["2", "command line"]
    assert data["environments"][0]["facts"]["device"] == "1 x cpu"


@pytest.mark.parametrize(
    ("command", "keys", "label"),
    [(["sft"], [], "Training loss"), (["rm", "train"], ["data.val_max_samples=16"], "Held-out accuracy")],
)
def test_sft_and_reward_models_end_with_a_page_too(tmp_path, capsys, command, keys, label):
    assert main([*command, *SMALL, *keys, f"trainer.default_local_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(label) and f"The report is in {tmp_path}/report.html" in out
    data = data_of(tmp_path / "report.html")
    assert data["subtitle"].startswith(" ".join(command) + " · ") and data["samples"] == []


def test_a_page_that_cannot_be_written_does_not_fail_the_run(tmp_path, capsys, caplog):
    (tmp_path / "report.html").mkdir()
    assert main(["train", *RL, f"trainer.default_local_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "Done: 2 steps of 2." in out and "The report is in" not in out and "Reward" in out
    assert "report.html was not written" in caplog.text


def test_a_resumed_run_continues_samples_and_settings(tmp_path, capsys):
    keys = [*RL, f"trainer.default_local_dir={tmp_path}"]
    assert main(["train", *keys, "trainer.total_training_steps=1"]) == 0
    assert main(["train", *keys]) == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 1, 2, 2]
    data = data_of(tmp_path / "report.html")
    assert data["configs"][0]["changes"][0] == [1, "trainer.total_training_steps", "1", "2"]
