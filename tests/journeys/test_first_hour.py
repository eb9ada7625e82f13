"""The first hour: the quickstart, a stop and the same command again, a look at results, a launch script, a GPU."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from journey import empty_folder, in_own_process, metrics, typed
from safetensors.torch import load_file

ROWS = "".join(json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(2, 34))
SHORT = "trainer.total_training_steps=2"
GPU = "4090"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return empty_folder(tmp_path, monkeypatch)


# The student


def quickstart() -> list[str]:
    """The commands of `make quickstart`, as make would run them."""
    recipe = subprocess.run(["make", "-n", "quickstart"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = recipe.replace("\\\n", " ").splitlines()
    return [" ".join(line.replace(".venv/bin/paddock", "paddock").split()) for line in lines if "bin/paddock" in line]


def accuracy(printed: str) -> float:
    return float(re.search(r"([\d.]+)%", printed)[1])


def test_a_student_types_the_quickstart(folder):
    """The commands of the Makefile with two steps in place of 80, and evaluations on 16 sums."""
    said = []
    for command in quickstart():
        short = command.replace("global_step_80", "global_step_2").replace("save_freq=80", "save_freq=2")
        more = (
            "data.val_max_samples=16"
            if " eval" in command
            else f"{SHORT} data.val_max_samples=16 data.train_batch_size=8"
        )
        said.append(typed(f"{short} {more}", folder)[0])
    before, sampled, trained, after, after_sampled = said
    assert "Done: 2 steps of 2" in trained and "report.html" in trained
    assert all(0 <= accuracy(each) <= 100 for each in (before, sampled, after, after_sampled))
    assert (folder / "checkpoints/quickstart/report.html").is_file()


@pytest.mark.slow
def test_a_student_sees_the_model_learn(folder):
    before, _, trained, after, _ = (in_own_process(command, folder)[0] for command in quickstart())
    assert "Done: 80 steps of 80" in trained
    assert accuracy(after) > accuracy(before) + 15


# A stop, and the same command again

LONG = "paddock train algorithm.adv_estimator=grpo trainer.total_training_steps={} trainer.default_local_dir={} " + (
    "trainer.save_freq=-1 trainer.test_freq=-1 trainer.val_before_train=False data.train_batch_size=8 data.seed=1"
)


def press_ctrl_c(run: Path, steps: int) -> threading.Thread:
    """Sends SIGINT to this process once the run has logged `steps` steps."""

    def wait() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if (run / "metrics.jsonl").is_file() and len(metrics(run)) >= steps:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.005)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_ctrl_c_and_the_same_command_give_the_run_that_was_not_stopped(folder):
    """Stopped at some step, resumed to the last one: the same metrics and weights, bit for bit, as in one go."""
    total = 40
    pressed = press_ctrl_c(folder / "run", 2)
    out, log = typed(LONG.format(total, "run"), folder, code=130)
    pressed.join()
    assert "stopping after this step, with a checkpoint" in log and "Stopped, with a checkpoint in" in out
    stopped = len(metrics(folder / "run"))
    assert 2 <= stopped < total
    last = stopped + 2
    out, _ = typed(LONG.format(last, "run"), folder)
    assert f"Done: 2 steps of {last}" in out
    typed(LONG.format(last, "whole"), folder)
    for one, other in zip(metrics(folder / "run"), metrics(folder / "whole"), strict=True):
        assert (
            one["actor/pg_loss"] == other["actor/pg_loss"]
            and one["critic/rewards/mean"] == other["critic/rewards/mean"]
        )
    first, second = (
        load_file(folder / run / f"global_step_{last}" / "actor" / "model.safetensors") for run in ("run", "whole")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


# A look at results


def test_results_are_looked_at_together_and_the_model_goes_out(folder):
    """Two seeds, one page of both, an answer on the spot, a model for transformers."""
    for seed in (1, 2):
        typed(f"paddock train algorithm.adv_estimator=grpo {SHORT} trainer.seed={seed} data.train_batch_size=8 "
              f"trainer.default_local_dir=runs/{seed} trainer.test_freq=-1 data.val_max_samples=8", folder)  # fmt: skip
    out, _ = typed("paddock report runs/1 runs/2 --out both.html", folder)
    assert "both.html" in out
    page = html.unescape((folder / "both.html").read_text())
    assert "runs/1" in page and "runs/2" in page and "critic/rewards/mean" in page
    assert not re.search(r"""(?:src|href)=["']https?://""", page), "the page needs no network"
    answer, _ = typed('paddock generate runs/1 prompt="3+4=" data.max_response_length=8', folder)
    assert answer.strip()
    typed("paddock export runs/1 model", folder)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        entry.name for entry in (folder / "model").iterdir()
    }


# An engineer with a launch script

SCRIPT = """\
set -x
MODEL=${MODEL:-builtin:tiny}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$PWD/train.parquet \\
    data.val_files=$PWD/train.parquet \\
    data.train_batch_size=8 \\
    data.max_prompt_length=16 \\
    data.max_response_length=8 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-4 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.rollout.n=4 \\
    algorithm.use_kl_in_reward=False \\
    custom_reward_function.path=$PWD/score.py \\
    trainer.logger='["console"]' \\
    trainer.project_name=verl_example \\
    trainer.experiment_name=first \\
    trainer.default_local_dir=$PWD/run \\
    trainer.n_gpus_per_node=1 trainer.nnodes=1 \\
    trainer.total_epochs=1 $@
"""
SCORE = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
"""


def verl_files(folder: Path) -> None:
    """A data file of verl's schema, a reward file and a launch script."""
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{n}+{n}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(16)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "run.sh").write_text(SCRIPT)
    (folder / "score.py").write_text(SCORE)


def test_a_verl_engineer_plans_a_launch_script(folder):
    """The script is a process of its own; it ends as a plan of ours."""
    verl_files(folder)
    out, _ = in_own_process("paddock run --plan run.sh trainer.device=cpu --json", folder)
    planned = json.loads(out)
    assert planned["batch"]["steps_per_epoch"] == 2 and planned["memory"]["fits"]
    assert planned["config"]["trainer"]["project_name"] == "verl_example"


@pytest.mark.slow
def test_a_verl_engineer_runs_the_launch_script_and_reads_its_lines(folder):
    verl_files(folder)
    out, _ = in_own_process("paddock run run.sh trainer.device=cpu", folder)
    lines = re.findall(r"^step:(\d+) - .*critic/rewards/mean:", out, re.M)
    assert lines == ["1", "2"], "the wide lines that scripts for verl are read by"
    assert [step["step"] for step in metrics(folder / "run")] == [0, 1, 2], "validation, and two steps"


# To a GPU


def test_the_move_to_a_gpu_is_planned_before_there_is_one(folder):
    """The command of the laptop, with a card and a model: memory, time and advice, and nothing is downloaded."""
    (folder / "mine.jsonl").write_text(ROWS)
    asked = f"paddock plan --gpu {GPU} data.train_files=mine.jsonl data.train_batch_size=32 reward=exact_match"
    card = "trainer.device=cuda trainer.n_gpus_per_node=1 actor_rollout_ref.model.path=Qwen/Qwen2.5-{}B-Instruct"
    planned = json.loads(typed(f"{asked} {card.format(0.5)} --json", folder)[0])
    assert planned["memory"]["fits"] and planned["memory"]["per_device_bytes"] == 24 * 2**30
    assert planned["seconds"]["step"] > 0 and planned["batch"]["train_rows"] == 32
    for estimator in ("gae", "grpo"):
        large, _ = typed(f"{asked} {card.format(7)} algorithm.adv_estimator={estimator}", folder)
        advice = large.partition("Advice")[2]
        assert "does not fit" in large and "actor_rollout_ref.model.lora_rank=64" in advice and "nnodes" not in advice
    assert sorted(entry.name for entry in folder.iterdir()) == ["mine.jsonl"]


@pytest.mark.gpu
def test_the_same_two_paths_train_on_a_gpu(folder):
    (folder / "mine.jsonl").write_text(ROWS)
    (folder / "r.py").write_text(SCORE)
    command = f"paddock train data.train_files=mine.jsonl custom_reward_function.path=r.py {SHORT}"
    out, log = typed(command, folder)
    assert "chosen: trainer.device=cuda" in log and "Done: 2 steps of 2" in out
    (run,) = (folder / "checkpoints/paddock").iterdir()
    assert len(metrics(run)) == 2 and (run / "report.html").is_file()
