"""Vision-language models on a GPU: rollouts, log-probs and updates as on a CPU, and runs that learn to name colours."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import Tensor

pytest.importorskip("PIL", reason="needs the extra `vision`")

from PIL import Image
from tiny_vision import encoded, painted, prompt_of, reader_of, save_tiny_vision, vision_batch

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.loading.load import load
from paddock.models.load import load_causal_lm
from paddock.models.vision import vision_tokens
from paddock.trainer.reinforcement import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = "cuda"
FP32, BF16 = torch.float32, torch.bfloat16
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "glm4v"]
LOG_PROBS = frozenset({"log_probs"})
GREEDY = Sampling(max_tokens=20, stop_tokens=frozenset({1}), seed=3, step=1, temperature=0.0)
SAMPLED = replace(GREEDY, temperature=1.0)
CLOSE = {FP32: 1e-3, BF16: 0.4}
"""Log-probs of two ways to compute the same, at most."""
COLOURS = {"r": (220, 30, 30), "g": (30, 200, 40), "b": (30, 40, 220), "y": (220, 210, 30)}
SCORER = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The last two bits of the answer's first letter name a colour: who guesses is right one time in four."""
    return float(bool(solution_str) and "rgby"[ord(solution_str[0]) % 4] == ground_truth)
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, a scorer, and images of one colour each, no two quite the same."""
    folder, draw, rows = tmp_path_factory.mktemp("images"), random.Random(0), []
    for index in range(128):
        name = draw.choice(list(COLOURS))
        colour = tuple(max(0, min(255, value + draw.randint(-30, 30))) for value in COLOURS[name])
        picture = Image.new("RGB", draw.choice(((8, 8), (16, 8), (16, 16))), colour)
        rows.append({"data_source": "colours", "prompt": [{"role": "user", "content": "<image>?"}],
                     "reward_model": {"style": "rule", "ground_truth": name}, "extra_info": {"index": index},
                     "images": [{"bytes": encoded(picture), "path": None}]})  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "score.py").write_text(SCORER)
    for family in FAMILIES:
        save_tiny_vision(folder / family, family)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And convolutions of a tower in float32, which a GPU would round to ten bits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def prompts_of(folder: Path) -> list[Prompt]:
    """One image, none, and two of other shapes; three answers to each."""
    reader = reader_of(folder)
    two = [painted((0, 255, 0), 32, 16), painted((9, 9, 200), 8, 24)]
    seen = [prompt_of(reader, [painted()]), prompt_of(reader, []), prompt_of(reader, two, "Which is larger?")]
    return [Prompt(tokens, [10 * i + j for j in range(3)], images) for i, (tokens, images) in enumerate(seen)]


def engine_of(folder: Path, dtype: torch.dtype = FP32, device: str = DEVICE, **changes: Any) -> Engine:
    model = load_causal_lm(str(folder), dtype=FP32, device=torch.device(device))
    optim = OptimConfig(lr=0.01, override_optimizer_config={"eps": 1e-3})
    settings = {"optim": optim, "compute": dtype, "budget": Budget(200), "forward_budget": Budget(200)}
    return Engine(SingleBackend(model, Settings(**settings | changes)))


def answered(prompts: list[Prompt], found: list[Completion]) -> Batch:
    rows, width = [(p.tokens, p.images) for p in prompts for _ in p.rows], SAMPLED.max_tokens
    lengths = torch.tensor([len(one.tokens) for one in found])
    tokens, chances = (
        torch.tensor([[*values, *[0] * (width - len(values))] for values in column])
        for column in ([one.tokens for one in found], [one.log_probs for one in found])
    )
    inside = torch.arange(width) < lengths[:, None]
    batch = vision_batch(rows, samples=1, width=width).with_(group=torch.arange(len(rows)) // 3)
    return batch.with_(responses=tokens, lengths=lengths, mask=inside.float(), rollout_log_probs=chances.float())


def log_probs(engine: Engine, batch: Batch) -> Tensor:
    found = engine.forward(batch, LOG_PROBS).log_probs
    assert found is not None
    return found.cpu() * batch.need("mask")


def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
    assert outputs.log_probs is not None
    return -(outputs.log_probs * micro.need("mask").to(outputs.log_probs)).sum() / 100, {}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_draws_what_the_plain_engine_draws_and_no_word_of_an_image(family, place):
    model, prompts = engine_of(place / family).model, prompts_of(place / family)
    for sampling in (GREEDY, SAMPLED):
        ours, theirs = (e(model, max_num_seqs=4).generate(prompts, sampling) for e in (EmbeddedEngine, HFEngine))
        assert [one.tokens for one in ours] == [one.tokens for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-3, rtol=0)
        assert not {token for one in ours for token in one.tokens} & set(vision_tokens(model.config))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_trainer_and_padded_rows_agree(family, dtype, place):
    engine, prompts = engine_of(place / family, dtype), prompts_of(place / family)
    batch = answered(prompts, EmbeddedEngine(engine.model, max_num_seqs=4).generate(prompts, SAMPLED))
    trainer = log_probs(engine, batch)
    assert engine.backend.shares_prompts
    others = {
        "rollout": batch.need("rollout_log_probs") * batch.need("mask"),
        "rows alone": log_probs(engine_of(place / family, dtype, share_prompts=False), batch),
        "padded": log_probs(engine_of(place / family, dtype, packed=False), batch),
    }
    for name, found in others.items():
        differences = (found - trainer).abs()
        assert differences.max() < CLOSE[dtype], f"{name}: {differences.max():.1e}"
        assert differences.sum() / batch.need("mask").sum() < 0.1 * CLOSE[dtype], f"{name}, mean"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cpu_has_the_same_log_probs_and_updates(family, place):
    prompts = prompts_of(place / family)
    batch = answered(prompts, EmbeddedEngine(engine_of(place / family).model).generate(prompts, SAMPLED))
    found = []
    for device in (DEVICE, "cpu"):
        engine = engine_of(place / family, device=device)
        before = log_probs(engine, batch)
        norms = [engine.train_step(engine.micro_batches(batch), loss, LOG_PROBS)["grad_norm"] for _ in range(3)]
        found.append((before, norms, log_probs(engine, batch)))
    for what, ours, theirs, tolerance in (("before", found[0][0], found[1][0], 0.05),
                                          ("after", found[0][2], found[1][2], 0.2)):  # fmt: skip
        assert (ours - theirs).abs().max() < tolerance, f"{what}: {(ours - theirs).abs().max():.1e}"
    assert found[0][1] == pytest.approx(found[1][1], rel=0.05)
    assert found[0][2].sum() > found[0][0].sum() + 10  # answers became likelier


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_learns_to_name_colours(family, place, tmp_path):
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    keys = ["algorithm.adv_estimator=grpo", f"actor_rollout_ref.model.path={place / family}", "data.image_key=images",
            f"data.train_files={place}/train.parquet", "data.train_batch_size=16", "data.max_prompt_length=48",
            "data.max_response_length=1", "data.dataloader_num_workers=0", f"{rollout}.n=16",
            f"{rollout}.name=embedded", f"{actor}.ppo_mini_batch_size=16", f"{actor}.optim.lr=0.002",
            f"{actor}.entropy_coeff=0.005",
            "trainer.total_training_steps=20", f"trainer.device={DEVICE}", "trainer.logger=[file]",
            f"trainer.default_local_dir={tmp_path}", "trainer.save_freq=-1", "trainer.test_freq=-1",
            "trainer.val_before_train=False", f"custom_reward_function.path={place}/score.py",
            "trainer.total_epochs=100"]  # fmt: skip
    assert train(load(keys).config).finished
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["critic/score/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    assert max(line["training/rollout_probs_diff_mean"] for line in lines) < 0.02
