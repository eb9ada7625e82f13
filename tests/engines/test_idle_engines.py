"""What leaves the device while a role is idle: the same numbers to the last bit, and no copy that is not needed.

The mechanics are those of a GPU, with the host's memory on both sides of the way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import Tensor

from paddock.config.engine import OptimConfig
from paddock.core.device import CopyStream
from paddock.engines.train import offload
from paddock.engines.train.engine import Engine, offload_idle
from paddock.engines.train.offload import Offload
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.loading.load import load
from paddock.models.adapters import Lora, attach, is_adapter
from paddock.rollouts.collect import Collector
from paddock.trainer.reinforcement import train
from paddock.workers.role import Role

CPU = torch.device("cpu")
WANT = frozenset({"log_probs", "entropy"})
BOTH = {"offload_params": True, "offload_optimizer": True}
BATCH = tiny_batch(4, prompt_len=4, response_len=5)  # few tokens: many a CPU multiplies bf16 slowly


def engine_of(away: bool = True, lora: bool = False, **changes: Any) -> Engine:
    model = tiny_model("qwen2")
    model.set_attn_implementation("paddock")
    if lora:
        pytest.importorskip("peft")
        model = attach(model.bfloat16(), Lora(rank=4), torch.float32)
    defaults: dict[str, Any] = {"optim": OptimConfig(lr=0.01), "budget": Budget(24), "compute": torch.bfloat16}
    engine = Engine(SingleBackend(model, Settings(**defaults | (BOTH if away else {}) | changes)))
    if away:
        offload_idle(engine, least=1)
        engine.move("host")
    return engine


def loss(micro: Any, outputs: Any) -> Any:
    return ((outputs.log_probs - 0.1 * outputs.entropy) * micro.mask).sum() / 20, {}


def update(engine: Engine, steps: int = 1) -> list[dict[str, float]]:
    engine.move("device")
    found = [engine.train_step(engine.micro_batches(BATCH), loss, WANT) for _ in range(steps)]
    engine.move("host")
    return found


def log_probs(engine: Engine) -> Tensor:
    engine.move("device")
    found = engine.forward(BATCH, WANT).log_probs
    engine.move("host")
    return found


def everything(engine: Engine) -> dict[str, Tensor]:
    engine.move("device")
    with engine.updater.offload.on_device() if engine.updater.offload else torch.no_grad():
        states = engine.updater.optimizer.state_dict()["state"].items()
        found = {f"{number}.{name}": value.clone() for number, state in states for name, value in state.items()}
        found |= {name: master.detach().clone() for name, master in engine.updater.named_masters().items()}
        found |= {f"own.{name}": tensor.clone() for name, tensor in engine.backend.tensors()}
    engine.move("host")
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and len(found) > 10
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def on_device(engine: Engine) -> int:
    tensors = [*engine.model.parameters(), *engine.model.buffers(), *engine.updater.idle_tensors()]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("lora", [False, True])
def test_steps_and_forwards_between_journeys_are_those_of_an_engine_that_stays(lora):
    engine, other = engine_of(lora=lora), engine_of(away=False, lora=lora)
    for steps in (1, 2, 1):
        assert torch.equal(log_probs(engine), log_probs(other))
        assert update(engine, steps) == update(other, steps)
    assert_same(everything(engine), everything(other))


@pytest.mark.parametrize("kept", ["offload_params", "offload_optimizer"])
def test_either_of_both_may_stay(kept):
    engine, other = engine_of(**{kept: False}), engine_of(away=False)
    for _ in range(2):
        assert update(engine) == update(other)
    assert_same(everything(engine), everything(other))


def test_nothing_is_left_on_the_device():
    engine = engine_of()
    assert on_device(engine) == 0
    update(engine)
    assert on_device(engine) == 0
    engine.move("device")
    weights = sum(param.nbytes for param in engine.model.parameters())
    assert on_device(engine) >= weights
    assert engine.updater.offload.on_host  # until a step begins
    engine.move("host")


def test_views_of_a_storage_that_left_see_what_came_back():
    whole = torch.arange(12.0)
    parts = [*whole.view(3, 4), whole[2:5]]
    expected = [part.clone() for part in parts]
    away = Offload(CopyStream(CPU), lambda: [parts[0]], least=1)
    for _ in range(2):
        away.to_host()
        assert whole.untyped_storage().nbytes() == 0
        away.prefetch()
        away.wait()
        assert all(torch.equal(*pair) for pair in zip(parts, expected, strict=True))


def test_storages_may_be_larger_than_a_piece_of_pinned_memory(monkeypatch):
    monkeypatch.setattr(offload, "CHUNK", 1024)
    tensors = [torch.randn(size) for size in (3, 1000, 17, 256, 255)]
    expected = [tensor.clone() for tensor in tensors]
    away = Offload(CopyStream(CPU), lambda: tensors, least=1)
    away.to_host()
    assert {len(piece) for buffer in away.buffers.values() for piece in buffer.pieces} <= {512, 1024}
    away.prefetch()
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))


def test_small_storages_stay():
    small, large = torch.ones(3), torch.ones(1 << 16)
    away = Offload(CopyStream(CPU), lambda: [small, large])
    away.to_host()
    assert small.untyped_storage().nbytes() == 12 and large.untyped_storage().nbytes() == 0


def test_frozen_weights_go_to_the_host_once_and_into_the_same_memory():
    engine = engine_of(optim=None, offload_optimizer=False)
    first, rooms = log_probs(engine), list(engine.offload.buffers.values())
    sent, size = engine.offload.sent, sum(buffer.size for buffer in rooms)
    assert sent == size > 0
    for _ in range(3):
        assert torch.equal(log_probs(engine), first)
    assert engine.offload.sent == sent and engine.offload.fetched == 4 * size
    assert list(engine.offload.buffers.values()) == rooms


def test_weights_are_sent_again_after_an_update_alone():
    engine = engine_of()
    log_probs(engine)
    sent = engine.offload.sent
    log_probs(engine)
    assert engine.offload.sent == sent and engine.updater.offload.fetched == 0  # which a forward does not need
    update(engine)
    assert engine.offload.sent == 2 * sent


def test_under_lora_the_frozen_weights_are_sent_once():
    engine = engine_of(lora=True)
    whole = engine.offload.sent
    update(engine)
    written = [p for name, p in engine.model.named_parameters() if is_adapter(name)] + [*engine.model.buffers()]
    assert engine.offload.sent == whole + sum(tensor.nbytes for tensor in written) < 1.5 * whole
    other = engine.without_adapters(Budget(64))
    before = log_probs(other)
    update(engine)
    assert torch.equal(log_probs(other), before) and not torch.equal(log_probs(engine), before)


class Road(CopyStream):
    """Notes what is asked of it."""

    def __init__(self, told: list[str]):
        super().__init__(CPU)
        self.told = told

    def launched(self) -> str:
        self.told.append("launched")
        return "copies"

    def wait(self, copies: Any) -> None:
        self.told += [] if copies is None else ["waited"]


def test_the_optimizer_comes_while_gradients_are_computed_and_the_step_waits_for_it(monkeypatch):
    engine, told = engine_of(), []
    update(engine)
    engine.updater.offload.copy_stream = Road(told)
    for part, name in ((engine.backend, "outputs"), (engine, "_numbers")):
        method = getattr(part, name)
        monkeypatch.setattr(part, name, lambda *a, n=name, m=method: (told.append(n), m(*a))[1])
    step = engine.updater.optimizer.step
    monkeypatch.setattr(engine.updater.optimizer, "step", lambda: (told.append("step"), step())[1])
    update(engine)
    micro_batches = len(engine.micro_batches(BATCH))
    assert told == ["launched", *["outputs"] * micro_batches, "_numbers", "waited", "step"]


def test_weights_that_were_called_early_are_waited_for_at_their_use():
    engine, told = engine_of(), []
    engine.offload.copy_stream = Road(told)
    for where in ("prefetch", "prefetch", "device", "device"):
        engine.move(where)
    assert told == ["launched", "waited"]
    engine.move("host")
    engine.move("prefetch")
    engine.move("host")  # nobody used them: their memory is given back behind the copy all the same
    assert told == ["launched", "waited"] * 2 and on_device(engine) == 0


@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_of_an_idle_engine_is_whole_and_it_stays_idle(tmp_path, lora):
    engine, other = engine_of(lora=lora), engine_of(away=False, lora=lora)
    for one in (engine, other):
        update(one, 2)
    for one, name in ((engine, "away"), (other, "here")):
        one.save(tmp_path / name)
    assert on_device(engine) == 0 and engine.offload.on_host and engine.updater.offload.on_host
    written = {path.name: path for path in (tmp_path / "away").rglob("*") if path.is_file()}
    for path in (tmp_path / "here").rglob("*.safetensors"):
        assert written[path.name].read_bytes() == path.read_bytes()
    resumed = engine_of(lora=lora)
    update(resumed)  # something else
    resumed.load(tmp_path / "away")
    assert resumed.offload.on_host and resumed.updater.offload.on_host
    assert update(resumed, 2) == update(other, 2)
    assert_same(everything(resumed), everything(other))


SMALL = [
    "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True", "data.train_batch_size=8",
    "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=3",
    "trainer.val_before_train=False", "trainer.test_freq=2", "data.val_max_samples=8", "trainer.save_freq=2",
    "trainer.logger=[file]", "data.dataloader_num_workers=0", "trainer.device=cpu",
    *(f"actor_rollout_ref.actor.fsdp_config.{key}_offload=True" for key in ("param", "optimizer")),
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
]  # fmt: skip


def run(folder: Path) -> list[dict[str, float]]:
    assert train(load([*SMALL, f"trainer.default_local_dir={folder}"]).config).finished
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing", "perf/", "throughput")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def test_a_run_with_everything_offloaded_is_the_run_without_and_the_reference_is_called_before_its_turn(
    tmp_path, monkeypatch
):
    """Steps with two mini-batches, old log-probs, validation and a checkpoint between them."""
    wanted = run(tmp_path / "stays")
    place, init, move, score, told = SingleBackend.__init__, Engine.__init__, Role.move, Collector.score, []

    def copied(self: SingleBackend, model: Any, settings: Settings) -> None:
        for param in model.parameters():
            param.data = param.data.clone()  # not a part of a file
        place(self, model, settings)

    def travelling(self: Engine, backend: SingleBackend) -> None:
        init(self, backend)
        offload_idle(self, least=1)

    def noted(self: Role, where: Any) -> None:
        told.append(f"{self.name} {where}")
        move(self, where)

    monkeypatch.setattr(SingleBackend, "__init__", copied)
    monkeypatch.setattr(Engine, "__init__", travelling)
    monkeypatch.setattr(Role, "move", noted)
    monkeypatch.setattr(Collector, "score", lambda self, *a, **k: (told.append("score"), score(self, *a, **k))[1])
    assert run(tmp_path / "travels") == wanted
    step = told[told.index("reference prefetch") : told.index("actor prefetch") + 1]
    forward = ["actor device", "actor host", "reference device", "reference host"]
    assert step == ["reference prefetch", "score", *forward, "actor prefetch"]
