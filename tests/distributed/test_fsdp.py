"""FSDP2 over gloo against one process: the same numbers, gradients and checkpoints, however the work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE, on_host
from ranks import Ranks
from tiny_models import tiny_model
from tiny_updates import WANT, in_role, loss_of, over_ranks, rollouts, settings
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from paddock.core.balance import balanced_order
from paddock.core.batch import Batch
from paddock.engines.train.engine import Engine, offload_idle
from paddock.engines.train.fsdp import FSDPBackend
from paddock.engines.train.offload import offloads_of
from paddock.engines.train.settings import Budget
from paddock.engines.train.shards import save_streamed
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.models.packing import sequence_lengths

STEPS = 4
TOKENS = torch.arange(4, 20)[None]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def model_of(role: str, family: str = "qwen2") -> Any:
    return in_role(tiny_model(family), role)


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def caught_gradient(engine: Engine) -> dict[str, Tensor]:
    """Before the optimizer sees it."""
    found: dict[str, Tensor] = {}
    clip = engine.updater.clip

    def catch() -> Tensor:
        found.update({name: full(master.grad) for name, master in engine.updater.named_masters().items()})
        return clip()

    engine.updater.clip = catch
    return found


def trained(engine: Engine, role: str, mine: Any, rows: int, steps: int = STEPS) -> dict[str, Any]:
    """Numbers, last gradient and weights after some steps; `mine` picks this rank's rows of a batch."""
    gradient, numbers = caught_gradient(engine), []
    for step in range(steps):
        batch = rollouts(rows, seed=step)
        micros = engine.micro_batches(mine(batch))
        engine.move("device")
        numbers.append(engine.train_step(micros, loss_of(role, batch), WANT[role]))
        engine.advance()
        engine.move("host")
    engine.move("device")
    return on_host({"numbers": numbers, "gradient": gradient, "weights": {n: t.clone() for n, t in engine.weights()}})


def part(rank: int, size: int, batch: Batch) -> Batch:
    return batch.rows(torch.tensor(balanced_order(sequence_lengths(batch), size)[rank], dtype=torch.long))


def train_on_rank(rank: int, role: str, family: str, changes: dict, shards: dict, rows: int) -> dict[str, Any]:
    engine = Engine(FSDPBackend(model_of(role, family), settings(**changes), over_ranks(**shards)))
    offload_idle(engine, least=1)  # what the settings name, as on a GPU
    shares = 2 // engine.backend.placement.sequence
    found = trained(engine, role, lambda batch: part(rank // engine.backend.placement.sequence, shares, batch), rows)
    assert all(offload.sent and offload.fetched for offload in offloads_of(engine))
    return found


TOLERANCE = 1e-5 if DEVICE.type == "cpu" else 2e-5
"""Of float32; a GPU adds in another order each time."""


def assert_equal_runs(got: dict[str, Any], want: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    for mine, theirs in zip(got["numbers"], want["numbers"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert mine[name] == pytest.approx(theirs[name], abs=tolerance, rel=tolerance), name
    for what in ("gradient", "weights"):
        assert got[what].keys() == want[what].keys()
        largest = max(1.0, *(tensor.abs().max().item() for tensor in want[what].values()))
        for name, tensor in want[what].items():
            distance = (got[what][name] - tensor).abs().max().item()
            assert distance <= tolerance * largest, f"{what} {name}: {distance}"


CASES = [
    ("actor", "qwen2", {}, {}, 7),
    ("critic", "qwen2", {}, {}, 7),
    ("actor", "llama", {"checkpointing": True}, {"reshard_after_forward": False}, 7),
    pytest.param(
        "actor", "qwen3", {"budget": Budget(64, rows=2)}, {"forward_prefetch": True}, 7, marks=pytest.mark.slow
    ),
    pytest.param("actor", "gemma2", {"packed": False}, {}, 7, marks=pytest.mark.slow),
    ("actor", "qwen2", {}, {"fsdp_size": 1}, 7),  # every rank has all weights
    ("actor", "qwen2", {"offload_params": True, "offload_optimizer": True}, {}, 1),  # one rank has no rows
    ("actor", "qwen2", {}, {"sequence": 2}, 7),
    pytest.param("critic", "llama", {"checkpointing": True}, {"sequence": 2}, 7, marks=pytest.mark.slow),
    ("actor", "gemma3", {}, {"sequence": 2}, 1),
]


@pytest.mark.parametrize(("role", "family", "changes", "shards", "rows"), CASES, ids=str)
def test_two_ranks_train_as_one_process_does(ranks, role, family, changes, shards, rows):
    single = Engine(SingleBackend(model_of(role, family), settings(**changes)))
    want = trained(single, role, lambda batch: batch, rows)
    for got in ranks(train_on_rank, role, family, changes, shards, rows):
        assert_equal_runs(got, want)


def forward_on_rank(rank: int, sequence: int) -> tuple[Tensor, Tensor]:
    engine = Engine(FSDPBackend(model_of("actor"), settings(optim=None), over_ranks(sequence=sequence)))
    mine = part(rank // sequence, 2 // sequence, rollouts())
    return mine.row, engine.forward(mine, frozenset({"log_probs"})).log_probs


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_frozen_model_gives_every_rank_the_log_probs_of_its_rows(ranks, sequence):
    batch = rollouts()
    want = (
        Engine(SingleBackend(model_of("actor"), settings(optim=None)))
        .forward(batch, frozenset({"log_probs"}))
        .log_probs
    )
    seen = set()
    for rows, got in ranks(forward_on_rank, sequence):
        torch.testing.assert_close(got, want[rows], atol=1e-5, rtol=0)
        seen |= set(rows.tolist())
    assert seen == set(batch.row.tolist())


def gathered_on_rank(rank: int, family: str, compute: torch.dtype) -> dict[str, Any]:
    engine = Engine(FSDPBackend(model_of("actor", family), settings(compute=compute), over_ranks()))
    batch = rollouts()
    engine.train_step(engine.micro_batches(part(rank, 2, batch)), loss_of("actor", batch), WANT["actor"])
    model = engine.rollout_model
    with engine.gathered():
        found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        logits = model(input_ids=TOKENS.to(DEVICE)).logits
    sizes = sum(param.numel() for param in model.parameters())
    masters = {name: full(tensor) for name, tensor in engine.updater.named_masters().items()}
    return {"weights": found, "logits": logits, "left": sizes, "masters": masters}


@pytest.mark.parametrize(("family", "compute"), [("qwen2", torch.bfloat16), ("llama", torch.float32)])
def test_a_rollout_sees_all_weights_in_a_plain_module_and_leaves_nothing(ranks, family, compute):
    """bf16 copies of float32 masters, the head tied where it is."""
    one, other = ranks(gathered_on_rank, family, compute)
    assert torch.equal(one["logits"], other["logits"]) and one["left"] == other["left"] == 0
    plain = tiny_model(family)
    for param in plain.parameters():
        param.data = param.data.to(compute)
    plain.load_state_dict(one["weights"])
    plain.set_attn_implementation("paddock")
    assert torch.equal(plain.to(DEVICE)(input_ids=TOKENS.to(DEVICE)).logits.cpu(), one["logits"])
    for name, master in one["masters"].items():
        assert master.dtype == torch.float32
        assert torch.equal(master.to(compute), one["weights"][name])
        assert (master != dict(tiny_model(family).named_parameters())[name]).any()


def bf16_gradient(rank: int) -> dict[str, Tensor]:
    engine = Engine(FSDPBackend(model_of("critic"), settings(compute=torch.bfloat16), over_ranks()))
    return trained(engine, "critic", lambda batch: part(rank, 2, batch), 7, steps=1)["gradient"]


def test_bf16_gradients_are_summed_in_float32(ranks):
    single = Engine(SingleBackend(model_of("critic"), settings(compute=torch.bfloat16)))
    want = trained(single, "critic", lambda batch: batch, 7, steps=1)["gradient"]
    got = ranks(bf16_gradient)[0]
    scale = max(tensor.abs().max().item() for tensor in want.values())
    for name, tensor in want.items():
        assert got[name].dtype == torch.float32
        torch.testing.assert_close(got[name], tensor, atol=0.03 * scale, rtol=0.1, msg=name)


def save_on_rank(rank: int, role: str, family: str, folder: Path) -> None:
    engine = Engine(FSDPBackend(model_of(role, family), settings(), over_ranks()))
    trained(engine, role, lambda batch: part(rank, 2, batch), 7, steps=2)
    engine.save(folder)


def resume_on_rank(rank: int, role: str, family: str, folder: Path) -> dict[str, Any]:
    engine = Engine(FSDPBackend(model_of(role, family), settings(), over_ranks()))
    engine.forward(part(rank, 2, rollouts()), WANT[role])  # gathers weights that loading makes stale
    engine.load(folder)
    return trained(engine, role, lambda batch: part(rank, 2, batch), 7, steps=2)


@pytest.mark.parametrize(
    ("role", "family"),
    [("actor", "qwen2"), pytest.param("actor", "llama", marks=pytest.mark.slow), ("critic", "qwen2")],
)
def test_a_checkpoint_goes_from_two_ranks_to_one_and_back(ranks, role, family, tmp_path):
    """Weights, optimizer and schedule: training goes on as if nothing had been."""
    straight = Engine(SingleBackend(model_of(role, family), settings()))
    trained(straight, role, lambda batch: batch, 7, steps=2)
    straight.save(tmp_path / "one")
    want = trained(straight, role, lambda batch: batch, 7, steps=2)
    ranks(save_on_rank, role, family, tmp_path / "two")
    again = Engine(SingleBackend(model_of(role, family), settings()))
    again.load(tmp_path / "two")
    assert again.updater.step_no == 2
    assert_equal_runs(trained(again, role, lambda batch: batch, 7, steps=2), want)
    for folder in ("one", "two"):
        for got in ranks(resume_on_rank, role, family, tmp_path / folder):
            assert_equal_runs(got, want)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_the_folder_is_one_that_transformers_loads(ranks, family, tmp_path):
    ranks(save_on_rank, "actor", family, tmp_path)
    single = Engine(SingleBackend(model_of("actor", family), settings()))
    single.load(tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.architectures == [type(tiny_model(family)).__name__]
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, dict(single.weights())[name].cpu())


def test_weights_are_written_a_few_layers_at_a_time(tmp_path):
    model = tiny_model("llama")
    save_streamed(tmp_path, model, model.named_parameters(), writes=True, staged=60_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and not list(tmp_path.glob(".part*"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(*pair) for pair in zip(again.parameters(), model.parameters(), strict=True))


def not_finite_on_rank(rank: int) -> tuple[dict[str, float], bool]:
    engine, batch = Engine(FSDPBackend(model_of("actor"), settings(), over_ranks())), rollouts()
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    if rank == 1:
        batch = batch.with_(advantages=batch.need("advantages") * float("nan"))
    numbers = engine.train_step(engine.micro_batches(part(rank, 2, batch)), loss_of("actor", batch), WANT["actor"])
    return numbers, all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())


def test_an_update_that_one_rank_finds_void_is_skipped_by_all(ranks):
    for numbers, unchanged in ranks(not_finite_on_rank):
        assert numbers["skipped"] == 1.0 and unchanged


def refused_on_rank(rank: int, changes: dict, shards: dict) -> None:
    model = in_role(tiny_model("llama", num_key_value_heads=1), "actor")
    Engine(FSDPBackend(model, settings(**changes), over_ranks(**shards)))


@pytest.mark.parametrize(
    ("changes", "shards", "reason"),
    [
        ({}, {"sequence": 2}, "actor.ulysses_sequence_parallel_size=2: the model's 1 key and value heads"),
        ({}, {"fsdp_size": 3}, "fsdp_size=3: 2 ranks do not divide"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(ranks, changes, shards, reason):
    with pytest.raises(UserError, match=reason):
        ranks(refused_on_rank, changes, shards)
