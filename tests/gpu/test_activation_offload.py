"""Activations on the host: less memory on a GPU, the same gradients, by the fused forward and by the modules' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.core.device import Carrier, memory_in_use, peak_memory, reset_peak_memory, synchronize
from paddock.engines.train.activations import Activations
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleEngine
from paddock.models.attention import FUSED

pytestmark = pytest.mark.gpu
LAYERS, HIDDEN, ROWS, LENGTH = 16, 1024, 4, 4096
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 2048, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2 * LENGTH, "initializer_range": 0.02,
}  # fmt: skip
WANT = frozenset({"log_probs"})


def engine_of(fused: bool) -> SingleEngine:
    model = tiny_model("qwen3", **SHAPE).to("cuda", torch.bfloat16)
    model.set_attn_implementation("paddock")
    optim = OptimConfig(lr=0.01)
    settings = Settings(optim=optim, budget=Budget(ROWS * LENGTH), compute=torch.bfloat16, checkpointing=True)
    engine = SingleEngine(model, settings)
    if not fused:
        vars(engine.backbone.base_model).pop(FUSED, None)
    return engine


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, 260, (ROWS, 8), generator=generator)
    responses = torch.randint(4, 260, (ROWS, LENGTH - 8), generator=generator)
    return Batch(
        row=torch.arange(ROWS),
        group=torch.arange(ROWS),
        prompts=prompts,
        prompt_mask=torch.ones_like(prompts),
        responses=responses,
        mask=torch.ones_like(responses),
        lengths=torch.full((ROWS,), LENGTH - 8),
    )


def step(engine: SingleEngine) -> tuple[dict[str, torch.Tensor], int]:
    def loss(micro: Any, outputs: Any) -> Any:
        return (outputs.log_probs * micro.mask).sum() / micro.mask.sum(), {}

    engine.model.train()
    for _ in range(2):  # the first makes what stays
        engine.updater.zero()
        synchronize(engine.device)
        reset_peak_memory(engine.device)
        start = memory_in_use(engine.device)
        engine.backward([batch()], loss, WANT)
        synchronize(engine.device)
    peak = peak_memory(engine.device) - start  # whatever other engines left behind
    return {n: p.grad.float().cpu() for n, p in engine.model.named_parameters()}, peak


@pytest.mark.parametrize("fused", [True, False])
def test_less_memory_and_the_same_gradients(fused):
    expected, before = step(engine_of(fused))
    again, _ = step(engine_of(fused))  # flash attention's backward adds up in whatever order it happens to
    engine = engine_of(fused)
    engine.activations = Activations(engine.model, Carrier(engine.device))
    found, after = step(engine)
    for name, gradient in expected.items():
        error, noise = ((other[name] - gradient).norm() / gradient.norm().clamp(min=1e-12) for other in (found, again))
        assert error < 2 * noise + 1e-3, (name, error, noise)
    inputs = LAYERS * ROWS * LENGTH * HIDDEN * 2
    print(f"fused={fused}: peak {before / 2**20:.0f} MiB, {after / 2**20:.0f} MiB with activations on the host")
    assert before - after > 0.6 * inputs
