"""Runs of vision-language models: they learn what an image shows, go on after a stop, and leave as they came."""

from __future__ import annotations

import json
import random
from base64 import b64decode
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file

pytest.importorskip("PIL", reason="needs the extra `vision`")

from PIL import Image
from tiny_vision import FAMILIES, encoded, painted, save_tiny_vision

from paddock.commands.evaluation import evaluate
from paddock.commands.export import export
from paddock.commands.generation import generate
from paddock.commands.keys_of import EVAL, GENERATE
from paddock.config.schema import Config
from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.hf import HFEngine
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.image_reader import ImageReader
from paddock.models.load import load_causal_lm
from paddock.trainer import reinforcement as runs
from paddock.trainer.assembly import Assembly

COLOURS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (30, 40, 220), "y": (220, 210, 30)}
SIZES = ((8, 8), (16, 8), (16, 16), (8, 16))
SCORER = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The last two bits of the answer's first letter name a colour: who guesses is right one time in four."""
    return float(bool(solution_str) and "rgby"[ord(solution_str[0]) % 4] == ground_truth)
'''


def colour_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Images of one colour, no two quite the same, in four shapes."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        name = draw.choice(list(COLOURS))
        colour = tuple(max(0, min(255, value + draw.randint(-30, 30))) for value in COLOURS[name])
        picture = Image.new("RGB", draw.choice(SIZES), colour)
        rows.append({
            "data_source": "colours",
            "prompt": [{"role": "user", "content": "<image>?"}],
            "reward_model": {"style": "rule", "ground_truth": name},
            "extra_info": {"index": index},
            "images": [{"bytes": encoded(picture), "path": None}],
        })  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    for name, count in (("train", 128), ("test", 32)):
        parquet.write_table(pa.Table.from_pylist(colour_rows(count, count)), folder / f"{name}.parquet")
    (folder / "score.py").write_text(SCORER)
    for family in FAMILIES:
        save_tiny_vision(folder / family, family)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_of(place: Path, out: Path, *overrides: str, family: str = "qwen2_5_vl") -> Config:
    return load([
        "algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={place / family}", "data.image_key=images",
        f"data.train_files={place}/train.parquet", "data.train_batch_size=4", "data.max_prompt_length=48",
        "data.max_response_length=2", "data.dataloader_num_workers=0", "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.name=embedded", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=0.003", "trainer.total_training_steps=2", "trainer.device=cpu",
        "trainer.logger=[file]", f"trainer.default_local_dir={out}", "trainer.save_freq=2", "trainer.test_freq=-1",
        "trainer.val_before_train=False", f"custom_reward_function.path={place}/score.py", "trainer.total_epochs=100",
        *overrides,
    ]).config  # fmt: skip


def metrics(out: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def weights(out: Path, step: int = 2) -> dict[str, torch.Tensor]:
    return load_file(out / f"global_step_{step}" / "actor" / "model.safetensors")


def learn(place: Path, out: Path, steps: int, family: str) -> tuple[list[float], list[float]]:
    """Rewards of all steps, and greedy accuracy on other images before and after."""
    settings = [
        "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.rollout.n=16",
        "data.max_response_length=1", "actor_rollout_ref.actor.optim.lr=0.001", "trainer.save_freq=-1",
        "actor_rollout_ref.actor.entropy_coeff=0.005", f"trainer.total_training_steps={steps}",
        f"data.val_files={place}/test.parquet", "trainer.val_before_train=True", f"trainer.test_freq={steps}",
    ]  # fmt: skip
    assert runs.train(config_of(place, out, *settings, family=family)).finished
    return metrics(out, "critic/score/mean"), metrics(out, "val-core/colours/reward/mean@1")


def test_a_tiny_model_begins_to_see_colours(place, tmp_path):
    rewards, accuracy = learn(place, tmp_path, 12, "qwen3_vl")
    assert max(rewards[-3:]) > rewards[0] + 0.1
    assert accuracy[1] > accuracy[0] + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_learns_to_name_colours(family, place, tmp_path):
    rewards, accuracy = learn(place, tmp_path, 70, family)
    assert rewards[0] < 0.5 and sum(rewards[-5:]) / 5 > 0.9
    assert accuracy[1] > 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_and_trainer_agree_in_a_run(family, place, tmp_path):
    assert runs.train(config_of(place, tmp_path, "trainer.save_freq=-1", family=family)).finished
    assert max(metrics(tmp_path, "training/rollout_probs_diff_max")) < 1e-5


@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_a_frozen_tower_stays_and_the_language_model_moves(engine, place, tmp_path):
    frozen = ["actor_rollout_ref.actor.freeze_vision_tower=True", f"actor_rollout_ref.rollout.name={engine}"]
    assert runs.train(config_of(place, tmp_path, *frozen, "actor_rollout_ref.actor.fsdp_config.dtype=float32")).finished
    before, after = load_file(place / "qwen2_5_vl" / "model.safetensors"), weights(tmp_path)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("visual" in name for name in moved)


def test_ppo_with_a_critic_that_sees(place, tmp_path):
    ppo = ["algorithm.adv_estimator=gae", f"critic.model.path={place / 'qwen3_vl'}", "critic.ppo_mini_batch_size=2"]
    assert runs.train(config_of(place, tmp_path, *ppo, "actor_rollout_ref.rollout.n=1", family="qwen3_vl")).finished
    critic = load_file(tmp_path / "global_step_2" / "critic" / "model.safetensors")
    assert any("visual" in name for name in critic)
    assert metrics(tmp_path, "critic/vf_loss")


def test_a_run_with_a_reference_and_micro_batches_of_rows(place, tmp_path):
    more = ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.use_dynamic_bsz=False",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.model.use_remove_padding=False",
            "actor_rollout_ref.model.enable_gradient_checkpointing=True"]  # fmt: skip
    assert runs.train(config_of(place, tmp_path, *more)).finished
    first, second = metrics(tmp_path, "actor/kl_loss")
    assert first == pytest.approx(0.0, abs=1e-4) and second > 1e-3


def test_a_run_goes_on_bit_for_bit(place, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert runs.train(config_of(place, whole, "trainer.total_training_steps=4")).finished
    for steps in (2, 4):
        assert runs.train(config_of(place, parts, f"trainer.total_training_steps={steps}")).finished
    one, other = weights(whole, 4), weights(parts, 4)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_exported_model_is_read_again_with_its_processor(place, tmp_path):
    assert runs.train(config_of(place, tmp_path / "run")).finished
    export(tmp_path / "run", tmp_path / "model", "fp32")
    assert (tmp_path / "model" / "preprocessor_config.json").is_file()
    stored, trained = load_file(tmp_path / "model" / "model.safetensors"), weights(tmp_path / "run")
    assert stored.keys() == trained.keys() and all(torch.equal(stored[name], trained[name]) for name in stored)
    again = config_of(place, tmp_path / "again", f"actor_rollout_ref.model.path={tmp_path / 'model'}")
    picture, reader = painted(), ImageReader.of(again.actor_rollout_ref, again.data)
    assert reader.read([reader.token], [picture])[1].pixels.shape[0] == 16
    assert runs.train(again).finished


def test_answers_are_scored_by_the_evaluation_and_written_by_the_generation(place, tmp_path):
    asked = [f"data={place}/test.parquet", f"model={place / 'glm4v'}", "rollout.name=embedded", "trainer.device=cpu",
             "data.max_prompt_length=48", "data.max_response_length=2"]  # fmt: skip
    config = EVAL.load([*asked, f"custom_reward_function.path={place}/score.py"]).config
    with ExitStack() as things:
        found = evaluate(Assembly(config, things))
    assert found.sources["colours"]["prompts"] == 32
    config = GENERATE.load([*asked, "rollout.do_sample=False", "rollout.dtype=float32"]).config
    with ExitStack() as things:
        generate(Assembly(config, things), tmp_path / "answers.parquet")
    texts = [row["responses"][0] for row in parquet.read_table(tmp_path / "answers.parquet").to_pylist()]
    assert texts == expected(config, place)
    with ExitStack() as things:
        generate(Assembly(config, things), tmp_path / "answers.jsonl")
    first = json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[0])
    assert Image.open(BytesIO(b64decode(first["images"][0]["bytes"]))).size in SIZES


def expected(config: Config, place: Path) -> list[str]:
    """By the plain engine, one prompt after the other."""
    from tiny_vision import vision_tokenizer

    from paddock.data.unscored import UnscoredDataset

    tokenizer, model = vision_tokenizer(), load_causal_lm(str(place / "glm4v"))
    dataset = UnscoredDataset.validation(config.data, tokenizer, ImageReader.of(config.actor_rollout_ref, config.data))
    sampling = Sampling(max_tokens=2, stop_tokens=frozenset({1}), seed=0, step=0, temperature=0.0)
    answers = [
        HFEngine(model).generate([Prompt(row.tokens, [row.index], row.images)], sampling)[0].tokens
        for row in dataset.rows(range(len(dataset)))
    ]
    return tokenizer.batch_decode(answers, skip_special_tokens=True)


def test_geometry_problems_are_answered_and_scored_by_their_own_rule(place, tmp_path):
    from paddock.data.prepare.geometry3k import COLUMNS, row
    from paddock.data.prepare.records import Record
    from paddock.data.prepare.write import arrow_schema

    raw = {"problem": "<image>Find x.", "answer": "4", "images": [{"bytes": encoded(painted()), "path": "a.png"}]}
    rows = [row(Record(raw, f"record {index}")) for index in range(8)]
    parquet.write_table(pa.Table.from_pylist(rows, schema=arrow_schema(COLUMNS)), tmp_path / "geo.parquet")
    longer = [
        f"data.train_files={tmp_path}/geo.parquet",
        "data.max_prompt_length=160",
        "custom_reward_function.path=null",
    ]
    assert runs.train(config_of(place, tmp_path / "out", *longer, "trainer.save_freq=-1")).finished
    assert metrics(tmp_path / "out", "critic/score/mean") == [0.0, 0.0]  # random words box nothing


def test_a_vision_model_also_learns_from_texts(place, tmp_path):
    rows = [row | {"images": None, "prompt": [{"role": "user", "content": "r?"}]} for row in colour_rows(16, 3)]
    for row in rows[:8]:
        row |= colour_rows(1, 4)[0]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "mixed.parquet")
    assert runs.train(config_of(place, tmp_path / "out", f"data.train_files={tmp_path}/mixed.parquet")).finished


def test_a_text_model_has_no_tower_to_freeze(place, tmp_path):
    from tiny_models import save_tiny

    frozen = ["actor_rollout_ref.actor.freeze_vision_tower=True", f"data.train_files={tmp_path}/texts.parquet"]
    rows = [{name: value for name, value in row.items() if name != "images"} for row in colour_rows(8, 5)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "texts.parquet")
    save_tiny(tmp_path / "model")
    with pytest.raises(UserError, match="no vision tower"):
        runs.train(config_of(place, tmp_path / "o", *frozen, f"actor_rollout_ref.model.path={tmp_path / 'model'}"))


def test_dumped_rollouts_hold_words_and_no_pixels(place, tmp_path):
    assert runs.train(
        config_of(place, tmp_path, f"trainer.rollout_data_dir={tmp_path}/dump", "trainer.save_freq=-1")
    ).finished
    lines = (tmp_path / "dump" / "1.jsonl").read_text().splitlines()
    assert len(lines) == 16 and all("images" not in json.loads(line)["extras"] for line in lines)


def test_a_reward_model_that_reads_texts_is_refused_beside_images(place, tmp_path):
    from tiny_vision import reader_of, vision_tokenizer

    from paddock.data.dataset import PromptDataset
    from paddock.trainer.model_rewards import ModelRewards
    from paddock.workers.reward_model import ClassifierScorer, JudgeScorer

    config = config_of(place, tmp_path)
    dataset = PromptDataset.train(config.data, vision_tokenizer(), reader_of(place / "qwen2_5_vl"))
    assert dataset.shows_images and not JudgeScorer.cheap
    with pytest.raises(UserError, match="it reads texts"):
        ModelRewards(ClassifierScorer.__new__(ClassifierScorer), config.reward_model).check(dataset)
