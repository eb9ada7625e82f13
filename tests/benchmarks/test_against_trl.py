"""TRL beside Paddock: it trains the same work, documents are compared by hand-worked values, and both are drawn."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from conftest import ROOT
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from benchmarks.results import comparison, equal_samples, experiment, pictures, tables
from benchmarks.results.comparison import Curve, Pair
from paddock.algorithms.advantages import grpo_advantage
from paddock.loading.load import load

PROMPTS, ANSWERS = 4, 2
KEYS = ["trainer.device=cpu", f"data.train_batch_size={PROMPTS}", "data.max_response_length=8",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}", f"actor_rollout_ref.rollout.n={ANSWERS}"]  # fmt: skip


def document(rewards: list[float], step_seconds: float, **more) -> dict:
    """A run whose steps all last as long."""
    steps = list(range(1, len(rewards) + 1))
    same = [step_seconds for _ in steps]
    curves = {"step": steps, "seconds": [step * step_seconds for step in steps], "reward": rewards,
              "step_seconds": same, "rollout_seconds": same, "update_seconds": same}  # fmt: skip
    return {
        **{"experiment": "grpo-0.5b", "title": "GRPO", "seed": 1, "model": "org/small", "device": "cpu"},
        **{"weights": {"sha256": "ab"}, "curves": curves, "held_out": {"step": []}, "command_seconds": 90.0, **more},
    }


RISING = [0.0, 0.04, 0.08, 0.12, 0.16, 0.2, 0.24, 0.28, 0.32, 0.36]
OURS = document(RISING, 12.0, held_out={"step": [0, 2, 4, 10], "strict": [0.0, 0.1, 0.2, 0.3]})
THEIRS = document(RISING[:5], 72.0, trainer="TRL 1.16.0", held_out={"step": [5], "strict": [0.15]})


def test_a_smoothed_reward_has_as_many_steps_before_it_as_after_it():
    curve = Curve([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.0, 0.3, 0.0, 0.0, 0.5, 0.1])
    assert curve.smoothed == pytest.approx([0.0, 0.1, 0.16, 0.18, 0.2, 0.1])
    assert Curve.of(THEIRS).smoothed == pytest.approx(RISING[:5]), "a straight line stays where it is"


def test_the_reward_at_a_time_and_the_time_of_a_reward_lie_on_the_line_between_steps():
    curve = Curve.of(THEIRS)
    assert curve.minutes == pytest.approx([1.2, 2.4, 3.6, 4.8, 6.0])
    assert curve.at(3.0) == pytest.approx(0.06) and curve.reaches(0.06) == pytest.approx(3.0)
    assert curve.at(1.0) is None and curve.at(6.1) is None, "nothing is known before the first step and after the last"
    assert curve.reaches(0.0) == pytest.approx(1.2) and curve.reaches(0.161) is None


def test_learning_per_minute_is_the_ratio_of_times_to_levels_that_both_reached():
    rows = list(Pair(OURS, THEIRS).learning_per_minute())
    assert rows == [
        ["grpo-0.5b, seed 1", "5", "0.45", "11.1", "2.70", "1.9", "6.0"],
        ["grpo-0.5b, seed 1", "10", "0.70", "14.3", "4.20", "2.4", "6.0"],
        ["grpo-0.5b, seed 1", "15", "0.95", "15.8", "5.70", "2.6", "6.0"],
    ]


def test_rewards_after_equal_minutes_stop_where_a_run_does():
    rows = [cells[1:] for cells in Pair(OURS, THEIRS).after_minutes()]
    assert rows[:3] == [["1", "16.0", "-"], ["2", "36.0", "2.7"], ["3", "-", "6.0"]]
    assert [cells[0] for cells in rows] == ["1", "2", "3", "4", "5", "6"]


def test_rewards_at_equal_samples_are_compared_step_by_step_as_far_as_both_came():
    ours = document([0.1, 0.2, 0.3, 0.9], 1.0)
    theirs = document([0.1, 0.1, 0.1], 9.0, trainer="TRL 1.16.0")
    (cells,) = Pair(ours, theirs).at_equal_samples()
    assert cells[1:] == ["1-3", "20.0", "10.0", "+10.0 ± 5.8", "20.0"]
    again = document([0.0, 0.1, 0.2], 1.0)
    (cells,) = Pair(ours, theirs, (again,)).at_equal_samples()
    assert cells[1:] == ["1-3", "20.0", "10.0", "+10.0 ± 5.8", "15.0 (10.0-20.0)"]
    longer = [Pair(document(RISING * 2, 1.0), document(RISING * 2, 9.0)).at_equal_samples()]
    assert [cells[1] for cells in longer[0]] == ["1-20", "11-20"]


def test_held_out_accuracy_is_that_of_the_last_validation_with_no_more_samples_than_the_other_had():
    assert list(Pair(OURS, THEIRS).held_out()) == [["grpo-0.5b, seed 1", "4", "20.0", "5", "15.0", "-"]]
    again = [{"held_out": {"step": [0, 5], "strict": [0.0, share]}} for share in (0.18, 0.22)]
    (cells,) = Pair(OURS, THEIRS, (*again, OURS)).held_out()
    assert cells[-1] == "20.0 (18.0-22.0)", "of those that were validated at the other's step"
    nothing = {"held_out": {"step": []}}
    assert list(Pair(OURS, THEIRS | nothing).held_out()) == list(Pair(OURS | nothing, THEIRS).held_out()) == []


def test_runs_are_paired_by_name_and_refused_if_they_start_from_other_weights(tmp_path):
    for name, run in (("grpo-0.5b-1", OURS), ("trl-grpo-0.5b-1", THEIRS), ("trl-grpo-0.5b-2", THEIRS)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    assert comparison.pairs(tmp_path) == [Pair(OURS, THEIRS)]
    assert pictures.read(tmp_path) == {"grpo-0.5b": [OURS]}, "Paddock's own pictures show Paddock's runs"
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "grpo-0.5b-1.json").write_text(json.dumps(OURS))
    assert comparison.pairs(tmp_path, [tmp_path / "again", tmp_path / "nowhere"]) == [Pair(OURS, THEIRS, (OURS,))]
    (tmp_path / "trl-grpo-0.5b-1.json").write_text(json.dumps({**THEIRS, "weights": {"sha256": "cd"}}))
    with pytest.raises(SystemExit, match=r"weights is .*cd.*, and .*ab"):
        comparison.pairs(tmp_path)


def test_both_curves_are_drawn_by_time_and_by_step():
    drawn = ElementTree.fromstring(comparison.draw([Pair(OURS, THEIRS)]))
    lines = drawn.findall("{*}polyline")
    colours = [found.get("stroke") for found in lines]
    assert colours == [colour for colour in comparison.COLOURS.values() for _ in ("time", "step")]
    ends = [float(found.get("points").split()[-1].partition(",")[0]) for found in lines]
    assert ends == [195.3, 940, 462, 740], "2 of 6 minutes, 10 of 10 steps; 6 of 6 minutes, 5 of 10 steps"
    words = [found.text for found in drawn.findall("{*}text")]
    assert {"minutes of training", "step", "Paddock", "TRL"} <= set(words)


def test_the_command_prints_every_table_and_writes_the_picture(tmp_path, monkeypatch, capsys):
    for name, run in (("grpo-0.5b-1", OURS), ("trl-grpo-0.5b-1", THEIRS)):
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    monkeypatch.setattr(sys, "argv", ["comparison", "--curves", str(tmp_path), "--out", str(tmp_path), "--again"])
    assert comparison.main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.isidentifier()] == [table.__name__ for table in comparison.TABLES]
    assert tables.row(["grpo-0.5b, seed 1", "TRL 1.16.0", "5", "72.00", "72.00", "72.00", "1.5"]) in printed
    assert (tmp_path / "against_trl_grpo-0.5b.svg").is_file()


COMMITTED = comparison.pairs(comparison.CURVES, comparison.AGAIN)
PAGES = [ROOT / "docs" / language / "results.md" for language in ("en", "zh")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_page_has_the_tables_of_the_committed_runs_and_names_how_they_were_made(page):
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
    for name, rows in comparison.tables(COMMITTED).items():
        assert "\n".join(rows) in text, name
    for pair in COMMITTED:
        for run in (pair.ours, pair.theirs):
            assert run["date"] in text and run["commit"] in text and not run["shared_device"]
        assert pair.theirs["trainer"] in text and "--seconds 620" in text and "--seconds=620" in pair.theirs["command"]


@pytest.mark.parametrize("name", ["grpo-0.5b"])
def test_the_committed_picture_shows_the_committed_pair(name):
    assert (comparison.IMAGES / f"against_trl_{name}.svg").read_text() == comparison.draw(COMMITTED)


def test_seeds_are_the_unit_of_chance_where_both_ran_many():
    runs = [{"reward": [0.0] * 10 + [share] * 10} for share in (0.2, 0.4)]
    found = equal_samples.rows({"steps": 20, "paddock": runs, "trl": [{"reward": [0.0] * 10 + [0.2] * 10}] * 2})
    assert found == [
        "| 1-20 | 15.0 (10.0-20.0) | 10.0 | +5.0 ± 5.0 |",
        "| 11-20 | 30.0 (20.0-40.0) | 20.0 | +10.0 ± 10.0 |",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_page_has_the_table_of_the_committed_seeds(page):
    text, document = page.read_text(), json.loads(equal_samples.FILE.read_text())
    assert "\n".join(equal_samples.rows(document)) in text and document["command"] in text
    assert document["date"] in text and len(document["paddock"]) == len(document["trl"]) == 8
    times = [median(run["step_seconds"] for run in document[name]) for name in ("paddock", "trl")]
    assert all(f"{seconds:.2f} s" in text for seconds in times)


@pytest.fixture(scope="module")
def trl_training():
    pytest.importorskip("trl", reason="TRL is not installed: make test-trl")
    from benchmarks.results import trl_training

    return trl_training


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model, and a file of problems that tell prompts apart."""
    from paddock.data.prepare.command import main as prepare

    folder = tmp_path_factory.mktemp("against_trl")
    (folder / "raw").mkdir()
    problems = [
        {"question": f"What is {n} + 2?", "answer": f"It is {n + 2}.\n#### {n + 2}"} for n in range(3, 3000, 300)
    ]
    for split in ("train", "test"):
        (folder / "raw" / f"{split}.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    prepare("gsm8k", ["--local_save_dir", str(folder / "data"), "--local_dataset_path", str(folder / "raw")])
    save_tiny(folder / "model")
    return folder


def config_of(name: str, folder: Path, *more: str):
    own = [f"actor_rollout_ref.model.path={folder / 'model'}", f"data.train_files={folder}/data/train.parquet",
           "trainer.total_training_steps=2", f"trainer.default_local_dir={folder}"]  # fmt: skip
    return load([*experiment.load(name).training(), *own, *KEYS, *more]).config


@pytest.fixture(scope="module")
def step(trl_training, folder) -> SimpleNamespace:
    """What TRL saw and did in one step of a run of two, which had no time for the second; a reward that varies."""
    config = config_of("grpo-0.5b", folder, "actor_rollout_ref.actor.fsdp_config.dtype=float32", "trainer.seed=3")
    seen = SimpleNamespace(rows=trl_training.prompts(config), prompts=[], answers=[], rewards=[], metrics=[])

    def reward(completion_ids, **columns):
        seen.answers += completion_ids
        seen.rewards += [float(sum(ids) % 3) for ids in completion_ids]
        return seen.rewards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl_training, "reward", reward)
        recorder = trl_training.Recorder(folder / "metrics.jsonl", seconds=0.0)
        settings = trl_training.arguments(config, micro_batch=2, weights="float32")
        trainer = trl_training.open_trainer(config, seen.rows, settings, recorder)
    generate = trainer._generate_single_turn

    def recorded(prompts, *rest):
        seen.prompts += prompts
        return generate(prompts, *rest)

    trainer._generate_single_turn = recorded
    trainer.train()
    seen.metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seen.weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    return seen


def test_trl_is_given_the_tokens_of_the_prompts_of_the_step_in_their_order(step):
    assert len(step.rows) == 2 * PROMPTS and len({tuple(row.tokens) for row in step.rows[:PROMPTS]}) == PROMPTS
    assert step.prompts == [row.tokens for row in step.rows[:PROMPTS] for _ in range(ANSWERS)]


def test_training_ends_after_the_step_that_passes_the_limit(step):
    (line,) = step.metrics
    assert line["step"] == 1 and line["critic/score/mean"] == pytest.approx(sum(step.rewards) / len(step.rewards))
    assert line["response_length/mean"] == sum(map(len, step.answers)) / len(step.answers)
    assert 0 < line["timing_s/gen"] < line["timing_s/step"]


def test_the_gradient_of_trl_is_that_of_paddocks_advantage_and_mean_over_tokens(step, folder):
    """TRL's std has 1e-4 added and Paddock's 1e-6, which the tolerance allows for."""
    rewards, groups = torch.tensor(step.rewards), torch.arange(PROMPTS * ANSWERS) // ANSWERS
    advantages = grpo_advantage(rewards, groups)
    assert advantages.abs().max() > 0, "an example without signal shows nothing"
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokens = sum(map(len, step.answers))
    for prompt, answer, advantage in zip(step.prompts, step.answers, advantages, strict=True):
        log_probs = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        drawn = log_probs.gather(1, torch.tensor(answer).unsqueeze(1)).sum()
        (-advantage * drawn / tokens).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert step.metrics[0]["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
    moved = {name: step.weights[name] - weight.detach() for name, weight in model.named_parameters()}
    along = sum((moved[name] * gradient).sum() for name, gradient in gradients.items())
    assert along < 0, "the step goes down the gradient"


def test_answers_to_messages_and_to_plain_texts_are_scored(trl_training):
    for answers in (["12", "21"], [[{"role": "assistant", "content": text}] for text in ("12", "21")]):
        assert trl_training.reward(answers, ["paddock/addition"] * 2, ["12"] * 2) == [1.0, 0.0]


def test_settings_of_trl_are_those_of_the_experiment(trl_training, folder):
    settings = trl_training.arguments(config_of("grpo-0.5b", folder), micro_batch=4, weights="float32")
    assert (settings.learning_rate, settings.lr_scheduler_type, settings.weight_decay) == (3e-6, "constant", 0.01)
    assert (settings.generation_batch_size, settings.gradient_accumulation_steps) == (PROMPTS * ANSWERS, 2)
    assert (settings.beta, settings.epsilon, settings.num_iterations, settings.loss_type) == (0.0, 0.2, 1, "dapo")
    assert (settings.temperature, settings.top_k, settings.top_p, settings.max_completion_length) == (1.0, 0, 1.0, 8)
    assert settings.bf16 and not settings.gradient_checkpointing and settings.max_grad_norm == 1.0
    with pytest.raises(SystemExit, match="--micro-batch 3: 8 answers"):
        trl_training.arguments(config_of("grpo-0.5b", folder), micro_batch=3, weights="float32")


@pytest.mark.parametrize("name", ["grpo-0.5b", "grpo-135m"])
def test_experiments_of_one_grpo_step_can_be_compared(trl_training, folder, name):
    trl_training.require_same_work(config_of(name, folder))


@pytest.mark.parametrize(
    "name,key", [("rloo-0.5b", "adv_estimator=rloo"), ("gspo-0.5b", "loss_mode=gspo"), ("dr-grpo-0.5b", "norm_adv")]
)
def test_an_experiment_that_trl_would_train_otherwise_is_refused(trl_training, folder, name, key):
    with pytest.raises(SystemExit, match=key):
        trl_training.require_same_work(config_of(name, folder))


@pytest.mark.slow
def test_trl_trains_and_paddock_evaluates_and_the_document_has_the_shape_of_paddocks(trl_training, folder, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.results.against_trl", "grpo-0.5b", "--seed", "1", "--steps", "2",
         "--seconds", "600", "--micro-batch", "4", "--data", folder / "data", "--out", tmp_path,
         "--model", folder / "model", "--set", *KEYS],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "trl-grpo-0.5b-1.json").read_text())
    assert run["finished"] and run["curves"]["step"] == [1, 2] and run["held_out"]["step"] == [2]
    assert run["trainer"].startswith("TRL ")
    (paddocks,) = [found for found in pictures.read()["grpo-0.5b"] if found["seed"] == 1]
    assert paddocks.keys() - {"sampled"} <= run.keys()
    assert paddocks["curves"].keys() - run["curves"].keys() <= {"gap", "memory_gib"}
