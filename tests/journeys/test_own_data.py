"""From a file of one's own to a trained model, by the commands that a user types, in an empty folder."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys

import datasets
import pytest
from conftest import ROOT
from journey import empty_folder, in_own_process, metrics, typed

ROWS = [{"question": f"{a}*{b}=", "answer": str(a * b)} for a in range(2, 12) for b in range(2, 12)]
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info):
    guess = solution_str.strip()
    right = sum(a == b for a, b in zip(guess, ground_truth))
    return right / max(len(guess), len(ground_truth))
"""
SHORT = "trainer.total_training_steps=2"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    empty = empty_folder(tmp_path, monkeypatch)
    (empty / "r.py").write_text(REWARD)
    return empty


def rewards(folder) -> list[float]:
    found = metrics(folder / "checkpoints/paddock/grpo")
    return [step["critic/rewards/mean"] for step in found if "critic/rewards/mean" in step]


def written(folder, kind: str) -> str:
    """The rows in one of the formats that people have; returns its name."""
    if kind == "csv":
        with (folder / "mine.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["question", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == "jsonl":
        (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        datasets.Dataset.from_list(ROWS).train_test_split(0.2, seed=0).save_to_disk(folder / "mine")
        return "mine"
    return f"mine.{kind}"


@pytest.mark.parametrize("kind", ["csv", "datasets"])
def test_two_paths_are_enough_to_train(folder, kind):
    name = written(folder, kind)
    out, log = typed(f"paddock train data.train_files={name} custom_reward_function.path=r.py {SHORT}", folder)
    for key in ("trainer.device=cpu", "actor_rollout_ref.model.path=builtin:tiny", "data.train_batch_size="):
        assert f"paddock: chosen: {key}" in log
    assert "prompts from 'question' (data.prompt_key), answers from 'answer' (data.answer_key)" in log
    assert len(rewards(folder)) == 2
    command = re.search(r"^Next: (paddock eval .*)$", out, re.M)[1]
    assert ("data=[mine]" in command or f"data={name}" in command) and "custom_reward_function.path=r.py" in command
    if kind == "datasets":  # the held-out split of the folder; others differ in how rows are read, which `train` did
        assert re.search(r"prompts +│ 20 ", typed(command, folder)[0])


def test_a_plan_shows_what_would_be_chosen_without_training(folder):
    written(folder, "csv")
    out, _ = typed("paddock plan data.train_files=mine.csv", folder)
    assert "chosen: actor_rollout_ref.model.path=builtin:tiny" in out and "100 rows" in out
    assert not (folder / "checkpoints").exists()


@pytest.mark.slow
def test_mixed_files_train_with_their_weights(folder):
    written(folder, "csv")
    written(folder, "jsonl")
    files = "data.train_files=[mine.csv,mine.jsonl] data.train_weights=[3,1]"
    typed(f"paddock train {files} custom_reward_function.path=r.py {SHORT}", folder)
    assert len(rewards(folder)) == 2


def test_the_next_line_of_from_jsonl_works_as_it_is_printed(folder):
    (folder / "mine.jsonl").write_text(
        "".join(json.dumps({"prompt": row["question"], "answer": row["answer"]}) + "\n" for row in ROWS)
    )
    out, _ = typed("paddock data from-jsonl mine.jsonl", folder)
    command = out.partition("Next: ")[2].strip()
    assert command.startswith("paddock train data.train_files=") and "Wrote 95 train and 5 test rows" in out
    out, _ = typed(f"{command} {SHORT}", folder)
    assert "Done: 2 steps of 2" in out


@pytest.mark.slow
def test_the_built_in_model_learns_a_task_of_ones_own_in_minutes(folder):
    name = written(folder, "csv")
    in_own_process(f"paddock train data.train_files={name} custom_reward_function.path=r.py", folder)
    found = rewards(folder)
    assert len(found) == 150
    assert sum(found[-10:]) / 10 > 0.3 > 0.2 > sum(found[:5]) / 5


def test_the_page_about_an_own_task_is_what_happens(folder):
    """Its two files are written as printed, and a plan chooses what the transcript says."""
    page = (ROOT / "docs" / "en" / "own_task.md").read_text()
    for name, text in re.findall(r"^```python\n# (\S+)\n(.*?)^```$", page, re.M | re.S):
        (folder / name).write_text(text)
    subprocess.run([sys.executable, "make.py"], cwd=folder, check=True)
    command = re.search(r"^paddock train (data.train_files=mine.csv .*)$", page, re.M)[1]
    out, _ = typed(f"paddock plan trainer.device=cpu {command}", folder)
    lines = [line for line in re.findall(r"^paddock: (chosen: .*)$", page, re.M) if "trainer.device" not in line]
    assert len(lines) == 9 and [line for line in lines if line not in out] == []
