"""On a GPU, idle weights and optimizers are on the host, and nothing but memory and time tells."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import Tensor

from paddock.config.engine import OptimConfig
from paddock.core.device import CopyStream, memory_in_use
from paddock.engines.train.engine import Engine, offload_idle
from paddock.engines.train.offload import LEAST, Offload, offloads_of
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.loading.load import load
from paddock.models.fused import fused
from paddock.trainer.reinforcement import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WANT = frozenset({"log_probs", "entropy"})
SHAPE: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192, "initializer_range": 0.02,
}  # fmt: skip
BOTH = {"offload_params": True, "offload_optimizer": True}
MIB = 2**20


def engine_of(**changes: Any) -> Engine:
    """Computes in bf16; the optimizer has masters and both moments in float32."""
    model = tiny_model("qwen3", **SHAPE).to("cuda")
    model.set_attn_implementation("paddock")
    defaults = {"optim": OptimConfig(lr=1e-3), "budget": Budget(100), "compute": torch.bfloat16}
    engine = Engine(SingleBackend(model, Settings(**defaults | changes)))
    assert fused(engine.backend.backbone) is not None
    return engine


def loss(micro: Any, outputs: Any) -> Any:
    return ((outputs.log_probs - 0.1 * outputs.entropy) * micro.mask).sum() / 20, {}


def trained(engine: Engine) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Three steps, with a forward before each, and the weights afterwards: the optimizer's and the model's."""
    numbers, batch = [], tiny_batch(8)
    for _ in range(3):
        for work in ("forward", "update"):
            engine.move("prefetch")
            engine.move("device")
            if work == "forward":
                engine.forward(batch, WANT)
            else:
                numbers.append(engine.train_step(engine.micro_batches(batch), loss, WANT))
            engine.move("host")
    for offload in offloads_of(engine):
        offload.prefetch()
        offload.wait()
    found = {f"master {name}": tensor for name, tensor in engine.updater.named_masters().items()}
    found |= dict(engine.backend.tensors())
    return numbers, {name: tensor.detach().clone() for name, tensor in found.items()}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    return max(((ours[name].double() - theirs[name].double()).abs().max().item(), name) for name in theirs)


@pytest.mark.parametrize("changes", [BOTH, {"offload_params": True}, {"offload_optimizer": True}], ids=str)
def test_three_steps_are_those_of_an_engine_that_stays_bit_for_bit(changes):
    """As far as one that stays repeats itself: attention's backward may add up in another order."""
    numbers, wanted = trained(engine_of())
    again, repeated = trained(engine_of())
    found, weights = trained(engine_of(**changes))
    noise, gap = distance(repeated, wanted), distance(weights, wanted)
    print(f"two runs that stay differ by {noise}, one that travels by {gap}")
    assert gap[0] <= 2 * noise[0], (gap, noise)
    for mine, theirs, others in zip(found, numbers, again, strict=True):
        for name, value in theirs.items():
            assert abs(mine[name] - value) <= 2 * abs(others[name] - value) + 1e-5 * abs(value), (name, mine, theirs)


def test_between_phases_the_device_has_room_for_others():
    gc.collect()  # of engines before this one: what they leave behind would be counted
    engine = engine_of(**BOTH)
    held = []
    for _ in range(2):
        engine.move("device")
        engine.train_step(engine.micro_batches(tiny_batch(8)), loss, WANT)
        torch.cuda.synchronize()
        before = memory_in_use(engine.device)
        engine.move("host")
        held.append(before - memory_in_use(engine.device))
    large = [param for param in engine.model.parameters() if param.numel() * 2 >= LEAST]
    expected = sum(param.numel() for param in large) * (2 + 4 + 4 + 4)
    print(f"left: {[size / MIB for size in held]} MiB, of weights that are large {expected / MIB:.1f}")
    assert all(size >= expected for size in held)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    engine.move("device")
    engine.updater.offload.prefetch()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - reserved > 0.5 * expected  # it was the device's again, not only torch's


def test_a_forward_leaves_the_optimizer_where_it_is_and_writes_nothing_to_the_host():
    engine = engine_of(**BOTH)
    engine.move("host")
    sent = engine.offload.sent, engine.updater.offload.sent
    for _ in range(3):
        engine.move("device")
        engine.forward(tiny_batch(8), WANT)
        engine.move("host")
    assert (engine.offload.sent, engine.updater.offload.sent) == sent and engine.updater.offload.fetched == 0


def test_a_reference_is_copied_to_the_host_once():
    engine = engine_of(optim=None, offload_params=True)
    batch, found = tiny_batch(8), []
    wanted = engine.forward(batch, WANT).log_probs
    for _ in range(4):
        engine.move("host")
        engine.move("prefetch")
        engine.move("device")
        found.append(engine.forward(batch, WANT).log_probs)
    pinned = [piece for buffer in engine.offload.buffers.values() for piece in buffer.pieces]
    assert all(piece.is_pinned() for piece in pinned)
    assert engine.offload.sent == sum(buffer.size for buffer in engine.offload.buffers.values())
    assert engine.offload.fetched == 4 * engine.offload.sent
    assert all(torch.equal(one, wanted) for one in found)


def test_copies_beside_heavy_work_carry_what_was_there():
    """Written just before they leave, their memory wanted by others at once, called back at once, and again."""
    tensors = [torch.zeros(size, device="cuda") for size in (3_000_000, 17_000_001, 40_000, 5_000_000)]
    away = Offload(CopyStream(torch.device("cuda", 0)), lambda: tensors)
    square = torch.randn(4096, 4096, device="cuda")
    for turn in range(1, 6):
        for _ in range(4):
            square = (square @ square).tanh()  # what follows is launched long before it runs
        for number, tensor in enumerate(tensors):
            tensor.fill_(turn + number / 8)
        away.written()
        away.to_host()
        others = [torch.full_like(square, -1.0) for _ in range(6)]
        away.prefetch()
        scribbles = [torch.full((3_000_000,), -2.0, device="cuda") for _ in range(8)]
        away.wait()
        for number, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full_like(tensor, turn + number / 8)), (turn, number)
        del others, scribbles


def test_weights_that_left_are_free_while_their_copy_runs_and_the_host_does_not_wait():
    tensor = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    away = Offload(CopyStream(torch.device("cuda", 0)), lambda: [tensor])
    for _ in range(2):
        away.to_host()
        away.prefetch()
        away.wait()
    away.written()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000_000)  # a tenth of a second of work before the copy may begin
    before = memory_in_use(tensor.device)
    start.record()
    away.to_host()
    end.record()
    assert not end.query() or start.elapsed_time(end) < 5.0  # milliseconds of the work's own stream
    assert before - memory_in_use(tensor.device) >= 256 * MIB
    away.prefetch()
    away.wait()
    assert not tensor.any()


def run(folder: Path, away: bool) -> list[dict[str, float]]:
    section = "actor_rollout_ref"
    keys = [
        "algorithm.adv_estimator=grpo", f"{section}.actor.use_kl_loss=True", "data.train_batch_size=8",
        f"{section}.rollout.n=4", f"{section}.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=2",
        "trainer.val_before_train=False", "trainer.test_freq=2", "data.val_max_samples=8", "trainer.save_freq=2",
        "trainer.logger=[file]", "data.dataloader_num_workers=0", "trainer.device=cuda",
        f"{section}.actor.fsdp_config.param_offload={away}", f"{section}.actor.fsdp_config.optimizer_offload={away}",
        f"{section}.ref.fsdp_config.param_offload={away}", f"trainer.default_local_dir={folder}",
    ]  # fmt: skip
    assert train(load(keys).config).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_whole_run_with_everything_offloaded_learns_what_the_other_learns(tmp_path, monkeypatch):
    """Rollouts by graphs, old log-probs, a reference, two mini-batches, validation, a checkpoint."""
    monkeypatch.setattr("paddock.engines.train.engine.offload_idle", partial(offload_idle, least=1))
    stays, travels = run(tmp_path / "stays", False), run(tmp_path / "travels", True)
    for name in ("response_length/mean", "critic/score/mean", "actor/grad_norm", "actor/kl_loss"):
        first, second = (line[name] for line in (stays[0], travels[0]))
        assert second == pytest.approx(first, rel=2e-2, abs=1e-4), name
    assert len(travels) == len(stays)
    gc.collect()
