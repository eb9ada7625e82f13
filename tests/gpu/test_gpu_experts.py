"""Mixtures of experts on a GPU: rollouts, log-probs, updates and routing replay as on a CPU, and a run that learns."""

from __future__ import annotations

import json
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest
import torch
from tiny_models import EOS, one_turn_each
from tiny_zoo import save, tiny
from torch import Tensor

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.engines.rollout.base import Completion, Prompt, Sampling
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.base import Outputs
from paddock.engines.train.engine import Engine
from paddock.engines.train.routers import RouterSettings
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.loading.load import load
from paddock.models.experts import Routing, experts_of
from paddock.rollouts.batch import with_responses
from paddock.trainer.reinforcement import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = "cuda"
FP32, BF16 = torch.float32, torch.bfloat16
FAMILIES = ["qwen3_moe", "deepseek_v3"]
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
LOG_PROBS = frozenset({"log_probs"})
DRAWN = torch.randint(4, 260, (8, 12), generator=torch.Generator().manual_seed(1))
PROMPTS = [Prompt(row[: 5 + i], [4 * i + j for j in range(4)]) for i, row in enumerate(DRAWN.tolist())]
SAMPLED = Sampling(max_tokens=24, stop_tokens=frozenset({EOS, *range(40, 60)}), seed=0, step=0)


def engine_of(family: str, dtype: torch.dtype = FP32, device: str = DEVICE, **changes: Any) -> Engine:
    model: Any = tiny(family, **SHAPE).to(device)
    model.set_attn_implementation("paddock")
    optim = OptimConfig(lr=0.01, override_optimizer_config={"eps": 1e-3})
    settings = {"optim": optim, "compute": dtype, "budget": Budget(256), "forward_budget": Budget(256)}
    return Engine(SingleBackend(model, Settings(**settings | {"routers": RouterSettings(replay=True)} | changes)))


def answered(found: list[Completion]) -> Batch:
    lengths = torch.tensor([len(prompt.tokens) for prompt in PROMPTS for _ in prompt.rows])
    mask = torch.arange(DRAWN.shape[1]) >= DRAWN.shape[1] - lengths[:, None]
    rows = [[0] * (DRAWN.shape[1] - len(p.tokens)) + p.tokens for p in PROMPTS for _ in p.rows]
    batch = Batch(
        torch.arange(len(rows)), torch.arange(len(rows)) // 4, torch.tensor(rows), prompt_mask=mask.long()
    )  # fmt: skip
    return with_responses(batch, one_turn_each(found, PROMPTS, range(len(PROMPTS)), version=0), 0)


def rolled(engine: Engine, **options: Any) -> Batch:
    """Sampled answers, with the experts of each token."""
    rollout = EmbeddedEngine(engine.model, max_num_seqs=9, max_num_batched_tokens=40, record_experts=True, **options)
    return answered(rollout.generate(PROMPTS, SAMPLED))


def gaps(batch: Batch, log_probs: Tensor) -> Tensor:
    """Of the tokens that the policy wrote."""
    return (log_probs.cpu() - batch.need("rollout_log_probs")).abs()[batch.need("mask") == 1]


def loss(micro: Batch, outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
    assert outputs.log_probs is not None
    signs = torch.randn(outputs.log_probs.shape, generator=torch.Generator().manual_seed(0)).to(outputs.log_probs)
    return (outputs.log_probs * signs * micro.need("mask").to(outputs.log_probs)).sum() / 100, {}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_draws_and_records_what_the_plain_engine_does(family):
    model = engine_of(family).model
    ours, theirs = (
        kind(model, max_num_seqs=9, record_experts=True).generate(PROMPTS, SAMPLED)
        for kind in (EmbeddedEngine, HFEngine)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens, one.row
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-3, rtol=0)
        assert one.experts is not None and other.experts is not None
        assert torch.equal(one.experts.prompt.sort(-1).values, other.experts.prompt.sort(-1).values), one.row
        assert torch.equal(one.experts.response.sort(-1).values, other.experts.response.sort(-1).values), one.row


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_recorded_experts_are_those_of_one_forward_over_the_sequence(family):
    engine = engine_of(family)
    batch = rolled(engine)
    places = experts_of(engine.model)
    assert places is not None
    for row in range(0, len(batch), 5):
        length, prompt = int(batch.need("lengths")[row]), int(batch.need("prompt_mask")[row].sum())
        words = [*batch.prompts[row, -prompt:].tolist(), *batch.need("responses")[row, : length - 1].tolist()]
        routing = Routing(places)
        engine.model(input_ids=torch.tensor([words], device=DEVICE), experts=routing)
        recorded = [batch.need("prompt_experts")[row, -prompt:], batch.need("response_experts")[row, : length - 1]]
        assert torch.equal(torch.cat(recorded).sort(-1).values, routing.chosen().cpu().sort(-1).values), row


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_rollout_trainer_padding_and_cpu_agree(family):
    engine = engine_of(family)
    batch = rolled(engine)
    trainer = engine.forward(batch, LOG_PROBS).log_probs
    assert trainer is not None
    assert gaps(batch, trainer).max() < 1e-3, f"rollout and trainer: {gaps(batch, trainer).max():.1e}"
    mask = batch.need("mask")
    for name, other in (("padded", engine_of(family, packed=False)), ("on a CPU", engine_of(family, device="cpu"))):
        found = other.forward(batch, LOG_PROBS).log_probs
        assert found is not None
        difference = ((found.cpu() - trainer.cpu()) * mask).abs().max()
        assert difference < 2e-3, f"{name}: {difference:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_replay_keeps_trainer_and_rollout_together(family):
    """Rounded differently, some tokens would go to other experts than those of the rollout."""
    engine = engine_of(family, BF16)
    batch = rolled(engine)
    found = engine.forward(batch, LOG_PROBS).log_probs
    assert found is not None
    difference = gaps(batch, found)
    assert difference.max() < 0.4 and difference.mean() < 0.03, f"{difference.max():.2f}, mean {difference.mean():.3f}"
    free = replace(engine.settings, routers=RouterSettings())
    alone = Engine(SingleBackend(engine.model, replace(free, optim=None))).forward(batch, LOG_PROBS).log_probs
    assert alone is not None and difference.mean() <= gaps(batch, alone).mean() + 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_with_replay_and_balance_are_those_of_a_cpu(family):
    batch, found = rolled(engine_of(family)), []
    for device in (DEVICE, "cpu"):
        engine = engine_of(family, device=device, routers=RouterSettings(replay=True, balance=0.01))
        numbers = [engine.train_step(engine.micro_batches(batch), loss, LOG_PROBS) for _ in range(3)]
        found.append((numbers, {name: tensor.cpu() for name, tensor in engine.weights()}))
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        assert ours["skipped"] == 0.0
        assert ours == pytest.approx(theirs, rel=0.05, abs=1e-3)
    for name, tensor in found[0][1].items():
        assert (tensor - found[1][1][name]).abs().max() < 5e-3, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_with_replay_learns(family, tmp_path):
    """Half of all bytes are below 128: from there most of them are."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(letter.isascii() for letter in solution_str) / max(len(solution_str), 1)\n"
    )
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    keys = ["algorithm.adv_estimator=grpo", "data.train_files=builtin:addition/train",
            "data.val_files=builtin:addition/test", "data.max_prompt_length=16", "data.max_response_length=6",
            "data.train_batch_size=8", "data.dataloader_num_workers=0", f"{actor}.ppo_mini_batch_size=8",
            f"{rollout}.n=8", f"{actor}.optim.lr=0.01", f"{actor}.router_replay.mode=R3",
            f"{rollout}.enable_rollout_routing_replay=True", "trainer.test_freq=-1", "trainer.val_before_train=False",
            "trainer.save_freq=-1", "trainer.logger=[file]", "trainer.total_training_steps=14",
            f"trainer.device={DEVICE}",
            f"actor_rollout_ref.model.path={save(tmp_path / 'model', family, **SHAPE)}",
            f"custom_reward_function.path={tmp_path / 'reward.py'}",
            f"trainer.default_local_dir={tmp_path / 'run'}"]  # fmt: skip
    if family == "qwen3_moe":  # the other one's config has no such field
        keys.append("++actor_rollout_ref.model.override_config.router_aux_loss_coef=0.01")
    assert train(load(keys).config).finished
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["critic/score/mean"] for line in lines]
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.15, rewards
    assert max(line["training/rollout_probs_diff_mean"] for line in lines) < 0.02
