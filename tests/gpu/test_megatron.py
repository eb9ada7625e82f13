"""On a GPU, megatron-core as it is, without Transformer Engine: the numbers of `single`, and a whole run.

Needs the wheel megatron-core 0.16.1 on the path, and nothing else that the machine has not.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from paddock.config.engine import OptimConfig
from paddock.config.roles import LoraConfig
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.loading.load import load
from paddock.trainer.reinforcement import train

pytest.importorskip("megatron.core", reason="needs megatron-core")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

from paddock.engines.train.megatron.backend import MegatronBackend  # noqa: E402

WANT = frozenset({"log_probs", "entropy"})
FP32, BF16 = torch.float32, torch.bfloat16
GPU = torch.device("cuda")
STEPS = 3


def model_of(family: str) -> Any:
    if family != "qwen3_moe":
        model = tiny_model(family)
    else:
        config = Qwen3MoeConfig(vocab_size=264, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
                                num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
                                moe_intermediate_size=32, norm_topk_prob=True, initializer_range=0.2)  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=FP32).eval()
    model.set_attn_implementation("paddock")
    return model


def settings(compute: torch.dtype, **changes: Any) -> Settings:
    optim = OptimConfig(lr=0.01, override_optimizer_config={"eps": 1e-3})
    return Settings(
        optim=optim, compute=compute, budget=Budget(64), forward_budget=Budget(64), total_steps=9, **changes
    )


def trained(engine: Any) -> tuple[torch.Tensor, list[float], dict[str, torch.Tensor]]:
    def loss(micro: Any, outputs: Any) -> Any:
        mask = micro.mask.to("cuda")
        return (outputs.log_probs * mask).sum() / 100 - outputs.entropy.sum() / 1000, {}

    first = engine.forward(tiny_batch(8), WANT).log_probs
    norms = []
    for seed in range(STEPS):
        batch = tiny_batch(8, seed=seed)
        norms.append(engine.train_step(engine.micro_batches(batch), loss, WANT)["grad_norm"])
    return first, norms, {name: tensor.float().cpu() for name, tensor in engine.weights()}


@pytest.mark.parametrize("changes", [{}, {"checkpointing": True}, {"offload_params": True, "offload_optimizer": True}])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_float32_equals_single(family, changes):
    want = trained(Engine(SingleBackend(model_of(family).to(GPU), settings(FP32, **changes))))
    got = trained(Engine(MegatronBackend(model_of(family), settings(FP32, **changes), device=GPU)))
    torch.testing.assert_close(got[0], want[0], atol=1e-3, rtol=0)
    assert got[1] == pytest.approx(want[1], rel=1e-2)
    for name, tensor in want[2].items():
        assert (got[2][name] - tensor).abs().max() < 2e-3, name


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_bfloat16_is_as_near_to_float32_as_single_is(family):
    exact = trained(Engine(SingleBackend(model_of(family).to(GPU), settings(FP32))))[0]
    single = trained(Engine(SingleBackend(model_of(family).to(GPU), settings(BF16))))[0]
    got = trained(Engine(MegatronBackend(model_of(family), settings(BF16), device=GPU)))[0]
    assert (got - exact).abs().mean() < 1.5 * (single - exact).abs().mean() + 1e-3


def test_adapters_learn_and_the_frozen_model_stays():
    engine = Engine(MegatronBackend(model_of("qwen3"), settings(BF16), device=GPU, lora=LoraConfig(rank=8)))
    before = engine.forward(tiny_batch(8), WANT).log_probs
    trained(engine)
    after = engine.forward(tiny_batch(8), WANT).log_probs
    assert (after - before).abs().max() > 0.01
    assert torch.equal(engine.without_adapters(Budget(64)).forward(tiny_batch(8), WANT).log_probs, before)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_run_learns_addition(tmp_path, estimator):
    keys = ["--config-name=ppo_megatron_trainer", f"algorithm.adv_estimator={estimator}", "trainer.device=cuda",
            "trainer.total_training_steps=30", "trainer.logger=[file]", "trainer.test_freq=30",
            "actor_rollout_ref.rollout.name=embedded", f"trainer.default_local_dir={tmp_path}"]  # fmt: skip
    assert train(load(keys).config).finished
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    scores = [row["reward/score/mean"] for row in rows if "reward/score/mean" in row]
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.05
    assert max(row.get("training/rollout_probs_diff_mean", 0.0) for row in rows) < 0.01
