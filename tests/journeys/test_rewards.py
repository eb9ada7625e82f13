"""Rewards as people bring them, by the real command in a clean folder: several with weights, and a TRL user's own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from journey import metrics, typed

SMALL = [
    *("algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=builtin:tiny", "trainer.device=cpu"),
    *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "data.max_response_length=8"),
    *("trainer.total_training_steps=2", "data.dataloader_num_workers=0", "reward_model.num_workers=1"),
    *("trainer.default_local_dir=run", "trainer.rollout_data_dir=rollouts", "trainer.logger=[file]"),
]


def write_rows(file: Path, **more) -> None:
    rows = [
        {
            "prompt": f"{n}+{n}=",
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
            "extra_info": {name: value[n % len(value)] for name, value in more.items()},
        }
        for n in range(8)
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def samples(folder: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()]


def test_several_rewards(tmp_path):
    """A rule by name, a function of ours and a function of a second file, each with its weight and its own curve."""
    write_rows(tmp_path / "train.jsonl")
    (tmp_path / "near.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 0.5 if solution_str[:1].isdigit() else 0.0\n"
    )
    (tmp_path / "form.py").write_text(
        "def short(completions, **columns): return [-float(len(c)) for c in completions]\n"
    )
    rewards = [
        *("reward=contains", "reward_weights=[2]"),
        *("custom_reward_function.path=[near.py,form.py:short]", "custom_reward_function.weights=[1,0.1]"),
    ]
    out, log = typed(shlex.join(["paddock", "train", *SMALL, "data.train_files=train.jsonl", *rewards]), tmp_path)
    assert len(metrics(tmp_path / "run")) == 2
    for step, logged in enumerate(metrics(tmp_path / "run"), start=1):
        rows = samples(tmp_path, step)
        for name in ("contains", "compute_score", "short"):
            values = [row["extras"][name] for row in rows]
            mean = sum(values) / len(values)
            assert logged[f"reward/{name}/mean"] == pytest.approx(mean)
            assert logged[f"reward/{name}/std"] == pytest.approx((sum((v - mean) ** 2 for v in values) / 16) ** 0.5)
        for row in rows:
            own = row["extras"]
            total = 2 * own["contains"] + own["compute_score"] + 0.1 * own["short"]
            assert row["score"] == pytest.approx(total) and own["short"] == -len(row["answer"])
    (evaluation,) = [line for line in (out + log).splitlines() if "paddock eval" in line]
    for setting in rewards:
        assert setting.replace("[2]", "[2.0]").replace("[1,0.1]", "[1.0,0.1]") in evaluation, (
            "the next command has them"
        )


TRL = '''
"""As it was written for GRPOTrainer(reward_funcs=[correct, brief])."""


def correct(prompts, completions, answer, **kwargs):
    assert all(prompt.endswith("=") for prompt in prompts)
    return [1.0 if completion.strip() == a else 0.0 for completion, a in zip(completions, answer)]


async def brief(completion_ids, task, trainer_state, **kwargs):
    weight = 1 - trainer_state.global_step / trainer_state.max_steps
    return [None if t == "free" else -weight * len(ids) for ids, t in zip(completion_ids, task)]


def wrong(completions, **kwargs):
    return [1.0]
'''


def test_a_trl_user(tmp_path):
    write_rows(tmp_path / "train.jsonl", task=["strict", "free"])
    (tmp_path / "rewards.py").write_text(TRL)
    named = ["data.train_files=train.jsonl", "custom_reward_function.path=rewards.py"]
    typed(shlex.join(["paddock", "train", *SMALL, *named, "custom_reward_function.name=[correct,brief]"]), tmp_path)
    for step, logged in enumerate(metrics(tmp_path / "run"), start=1):
        rows = samples(tmp_path, step)
        strict = [row["extras"]["brief"] for row in rows if row["extras"]["extra_info"]["task"] == "strict"]
        free = [row["extras"]["brief"] for row in rows if row["extras"]["extra_info"]["task"] == "free"]
        weight = 1 - (step - 1) / 2
        assert sorted(strict) == sorted(
            -weight * r["length"] for r in rows if r["extras"]["extra_info"]["task"] == "strict"
        )
        assert set(free) == {None} and logged["reward/brief/mean"] == pytest.approx(sum(strict) / len(strict))
        assert all(row["extras"]["correct"] == (row["answer"].strip() == row["ground_truth"]) for row in rows)
        assert logged["reward/unscored"] == 0
    named += ["custom_reward_function.name=wrong", "trainer.default_local_dir=other"]
    _, said = typed(shlex.join(["paddock", "train", *SMALL, *named]), tmp_path, code=2)
    assert "custom_reward_function.path=rewards.py: wrong returned 1 scores for 2 rows" in said and "fix: " in said
    assert "Traceback" not in said and not (tmp_path / "other" / "metrics.jsonl").exists()
