"""`paddock eval` as a user types it."""

from __future__ import annotations

import json

import pytest

from paddock.cli import main
from paddock.commands.keys_of import EVAL, GENERATE
from paddock.trainer.validation import pass_at

SAMPLED = ["rollout.val_kwargs.n=4", "rollout.val_kwargs.do_sample=True", "rollout.val_kwargs.temperature=1.0"]
FEW = ["data.val_max_samples=24"]


def test_accuracy_is_the_share_of_greedy_answers_that_are_right(tmp_path, capsys):
    assert main(["generate", f"output={tmp_path}/a.jsonl", "rollout.do_sample=False", *FEW]) == 0
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    right = sum(row["responses"][0] == row["reward_model"]["ground_truth"] for row in rows)
    capsys.readouterr()
    assert main(["eval", f"--json={tmp_path}/eval.json", *FEW]) == 0
    table = capsys.readouterr().out
    found = json.loads((tmp_path / "eval.json").read_text())
    assert found["sources"]["paddock/addition"]["metrics"]["mean@1"] == right / len(rows)
    assert 0 < right < len(rows)
    assert f"{100 * right / len(rows):.1f}%" in table and "builtin:tiny on builtin:addition/test" in table


def test_many_answers_give_mean_pass_and_majority(tmp_path, capsys):
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = solution_str == ground_truth\n"
        "    return {'score': 2.0 * right - 1, 'acc': float(right), 'pred': solution_str}\n"
    )
    dump = tmp_path / "answers"
    arguments = [f"custom_reward_function.path={scorer}", f"trainer.validation_data_dir={dump}", *SAMPLED, *FEW]
    assert main(["eval", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["sources"]["paddock/addition"]
    assert found["variable"] == "acc" and found["prompts"] == 24
    metrics = found["metrics"]
    answers = [json.loads(line) for line in (dump / "0.jsonl").read_text().splitlines()]
    right: dict[int, int] = {}
    for answer in answers:
        right[answer["group"]] = right.get(answer["group"], 0) + (answer["answer"] == answer["ground_truth"])
    assert len(answers) == 96
    assert metrics["mean@4"] == pytest.approx(sum(right.values()) / 96)
    assert metrics["pass@2"] == pytest.approx(sum(pass_at(4, count, 2) for count in right.values()) / 24)
    assert metrics["pass@4"] >= metrics["pass@2"] >= metrics["mean@4"]
    assert {"maj@4/mean", "best@4/mean"} <= metrics.keys()


def test_the_table_shows_each_fact_once(capsys):
    assert main(["eval", *SAMPLED, *FEW]) == 0
    out = capsys.readouterr().out
    assert [name in out for name in ("mean@4", "pass@2", "pass@4", "pass@1", "best@4", "std@4")] == [True] * 3 + [
        False
    ] * 3


def test_batches_of_prompts_do_not_change_the_result(capsys):
    found = []
    for size in (5, 24):
        assert main(["eval", "--json", f"data.val_batch_size={size}", *SAMPLED, *FEW]) == 0
        found.append(json.loads(capsys.readouterr().out)["sources"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json="], "--json: needs a file name"),
        (["data.val_flies=x"], "did you mean data.val_files"),
        (
            ["model=/nowhere/model", "data=builtin:addition/test"],
            "actor_rollout_ref.model.path=/nowhere/model: no such folder",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(arguments, message, capsys):
    assert main(["eval", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name, value", [("n", "4"), ("temperature", "0.3"), ("top_p", "0.5")])
def test_sampling_of_training_is_not_that_of_eval_and_the_other_way_round(name, value):
    key = f"actor_rollout_ref.rollout.{name}"
    assert EVAL.load([f"rollout.{name}={value}"]).warnings == [
        f"{key} has no effect on `paddock eval`: it reads actor_rollout_ref.rollout.val_kwargs.{name}"
    ]
    assert GENERATE.load([f"rollout.val_kwargs.{name}={value}"]).warnings == [
        f"actor_rollout_ref.rollout.val_kwargs.{name} has no effect on `paddock generate`: it reads {key}"
    ]
    assert GENERATE.load([f"rollout.{name}={value}"]).warnings == []
