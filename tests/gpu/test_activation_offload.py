"""Activations on the host: less memory on a GPU, the same gradients, by the fused forward and by the modules' own."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from paddock.commands import preflight
from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.core.device import CopyStream, empty_cache, memory_in_use, peak_memory, reset_peak_memory, synchronize
from paddock.engines.train.activations import BEHIND, Activations
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.loading.load import load
from paddock.models.forward import FUSED
from paddock.trainer.reinforcement import train

pytestmark = pytest.mark.gpu
LAYERS, HIDDEN, ROWS, LENGTH = 16, 1024, 4, 4096
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 2048, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 2 * LENGTH, "initializer_range": 0.02,
}  # fmt: skip
WANT = frozenset({"log_probs"})


def engine_of(fused: bool) -> Engine:
    model = tiny_model("qwen3", **SHAPE).to("cuda", torch.bfloat16)
    model.set_attn_implementation("paddock")
    optim = OptimConfig(lr=0.01)
    settings = Settings(optim=optim, budget=Budget(ROWS * LENGTH), compute=torch.bfloat16, checkpointing=True)
    engine = Engine(SingleBackend(model, settings))
    if not fused:
        vars(engine.backend.backbone.base_model).pop(FUSED, None)
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


def step(engine: Engine) -> tuple[dict[str, torch.Tensor], int, int]:
    """Gradients, and the most that the step took above what was there: of tensors, and of the device for them.

    Gradients are there from the beginning, as in every micro-batch but the first: else the peak would be where the last
    of them is made, when no inputs are left to be saved.
    """

    def loss(micro: Any, outputs: Any) -> Any:
        return (outputs.log_probs * micro.mask).sum() / micro.mask.sum(), {}

    engine.model.train()
    for _ in range(2):  # the first makes what stays; the second adds to its gradients
        gc.collect()
        synchronize(engine.device)
        empty_cache(engine.device)
        reset_peak_memory(engine.device)
        start, taken = memory_in_use(engine.device), torch.cuda.memory_reserved()
        engine._backward([batch()], loss, WANT)
        synchronize(engine.device)
    peaks = peak_memory(engine.device) - start, torch.cuda.max_memory_reserved() - taken
    return {n: p.grad.float().cpu() for n, p in engine.model.named_parameters()}, *peaks


@pytest.mark.parametrize("fused", [True, False])
def test_less_memory_and_the_same_gradients(fused):
    expected, before, taken_before = step(engine_of(fused))
    again, *_ = step(engine_of(fused))  # flash attention's backward adds up in whatever order it happens to
    engine = engine_of(fused)
    engine.backend.activations = Activations(engine.model, CopyStream(engine.device))
    found, after, taken_after = step(engine)
    for name, gradient in expected.items():
        error, noise = ((other[name] - gradient).norm() / gradient.norm().clamp(min=1e-12) for other in (found, again))
        assert error < 2 * noise + 1e-3, (name, error, noise)
    a_layer = ROWS * LENGTH * HIDDEN * (4 if fused else 2)  # the fused stream is float32
    on_the_way = 2 + BEHIND  # in use, and leaving or coming
    numbers = [f"{size / 2**20:.0f} MiB" for size in (a_layer, before, after, taken_before, taken_after)]
    print(f"fused={fused}, a layer's input {numbers[0]}: tensors at most {numbers[1]} -> {numbers[2]}, "
          f"memory of the device {numbers[3]} -> {numbers[4]}")  # fmt: skip
    assert before - after > 0.9 * (LAYERS - on_the_way) * a_layer, numbers
    assert taken_before - taken_after > 0.7 * (LAYERS - on_the_way) * a_layer, numbers


def test_training_takes_the_key(tmp_path):
    keys = ["algorithm.adv_estimator=grpo", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2",
            "trainer.total_training_steps=1", "trainer.val_before_train=False", "trainer.test_freq=-1",
            "trainer.logger=[file]", "data.dataloader_num_workers=0", "trainer.device=cuda",
            "actor_rollout_ref.model.enable_gradient_checkpointing=True", f"trainer.default_local_dir={tmp_path}",
            "actor_rollout_ref.model.enable_activation_offload=True"]  # fmt: skip
    config = load(keys).config
    preflight.check(config)
    assert train(config).finished
