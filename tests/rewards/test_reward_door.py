"""`paddock train` with a scorer that is wrong: one message with file, function, row and value, and exit code 2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from paddock.cli import main

SMALL = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=hf",
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=1",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.logger=[file]",
    "data.dataloader_num_workers=0",
    "reward_model.num_workers=1",
]
ROW = r"builtin:addition/train row \d+"
MISTAKES = {
    "raises": ("1 / 0", r"raised ZeroDivisionError: division by zero \(my_reward.py line 3\)"),
    "None": ("None", r"returned None \(NoneType\), not a number"),
    "NaN": ("float('nan')", "returned nan"),
    "a string": ("'1.0'", r"returned '1.0' \(str\), not a number"),
    "no score": ("{'acc': 1.0}", r"returned a dict without 'score': its keys are \['acc'\]"),
}


@pytest.fixture
def train(tmp_path, capsys):
    """The exit code and what was printed, of a run whose scorer returns `value` where `condition` holds, else 1."""

    def run(value: str, condition: str, *settings: str) -> tuple[int, str]:
        code = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        code += f"    if {condition}:\n        return {value}\n    return 1.0\n"
        Path(tmp_path / "my_reward.py").write_text(code)
        arguments = [*SMALL, f"trainer.default_local_dir={tmp_path}/run", *settings]
        code = main(["train", f"custom_reward_function.path={tmp_path}/my_reward.py", *arguments])
        return code, capsys.readouterr().err

    return run


def message(error: str) -> str:
    """One, and no traceback."""
    assert "Traceback" not in error
    (line,) = [line for line in error.splitlines() if line.startswith("paddock: custom_reward_function.path=")]
    assert "\n  fix: " in error
    return line


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_scorer_that_is_always_wrong_stops_the_run_before_it_begins(train, tmp_path, mistake):
    value, reason = MISTAKES[mistake]
    code, error = train(value, "True")
    found = message(error)
    assert code == 2 and re.search(rf"{tmp_path}/my_reward.py: compute_score {reason}, on {ROW} ", found), found
    assert "response ''" in found and not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("mistake", "early"), [("NaN", True), ("raises", True), ("raises", False)])
def test_a_scorer_that_is_wrong_on_a_real_answer_stops_the_run_at_that_row(train, tmp_path, mistake, early):
    value, reason = MISTAKES[mistake]
    code, error = train(value, "solution_str", f"reward_model.launch_reward_fn_async={early}")
    found = message(error)
    assert code == 2 and re.search(rf"compute_score {reason}, on {ROW} \(row id \d+\) ", found), found
    assert re.search(r"data_source=paddock/addition, ground_truth='\d+', response '.+'", found), found


def test_a_scorer_that_hangs_is_cut_off_counted_and_the_run_goes_on(train, tmp_path):
    code, error = train("__import__('time').sleep(100)", "solution_str", "reward_model.timeout=0.3")
    assert code == 0, error
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["reward/timeouts"] == 8 and json.loads(line)["reward/score/mean"] == 0


def test_a_built_in_scorer_whose_truth_is_wrong_names_the_row(tmp_path, capsys):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "1+1"}],
            "reward_model": {"style": "rule", "ground_truth": truth},
        }
        for truth in ("two", "2", "2", "2")
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    here = ["actor_rollout_ref.model.path=builtin:tiny", "trainer.device=cpu"]
    assert main(["train", *SMALL, *here, f"data.train_files={tmp_path}/train.parquet"]) == 2
    error = capsys.readouterr().err
    assert "the ground truth 'two' is not a number" in error and "train.parquet row 0" in error


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["reward_model.compute_score_kwargs={metod: flexible}"], "no built-in scorer takes 'metod'"),
        (["custom_reward_function.path=FILE", "reward_model.compute_score_kwargs={method: flexible}"], "your own"),
        (["reward_model.timeout=0"], "reward_model.timeout"),
        (["reward_model.reward_manager=rate_limited"], "none is named"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(tmp_path, capsys, settings, reason):
    (tmp_path / "f.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): return 1")
    assert main(["train", *SMALL, *(each.replace("FILE", f"{tmp_path}/f.py") for each in settings)]) == 2
    assert reason in capsys.readouterr().err
