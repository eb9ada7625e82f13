"""Experts over ranks: recorded, replayed and balanced as in one process, also where ranks share sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from devices import DEVICE, on_host
from ranks import Ranks
from test_fsdp import caught_gradient
from tiny_updates import in_role, loss_of, over_ranks, rollouts, settings
from tiny_zoo import SPARSE, tiny
from torch import Tensor

from paddock.core.balance import balanced_order
from paddock.core.batch import Batch
from paddock.engines.train.base import EXPERT_COLUMNS
from paddock.engines.train.engine import Engine
from paddock.engines.train.fsdp import FSDPBackend
from paddock.engines.train.routers import RouterSettings
from paddock.engines.train.single import SingleBackend
from paddock.models.experts import experts_of
from paddock.models.gathered import GatheredModel
from paddock.models.packing import sequence_lengths

LOG_PROBS, WANT = frozenset({"log_probs"}), frozenset({"log_probs", "entropy"})
ROUTERS = ("router_entropy", "router_load_max", "router_dead_experts", "router_replay_agreement", "aux_loss")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def model_of(family: str) -> Any:
    return in_role(tiny(family), "actor")


def recorded(family: str, batch: Batch) -> Batch:
    other = Engine(SingleBackend(model_of(family), settings(routers=RouterSettings())))
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    found = other.forward(batch, LOG_PROBS | EXPERT_COLUMNS)
    return batch.with_(prompt_experts=found.prompt_experts, response_experts=found.response_experts)


def trained(engine: Engine, batch: Batch, mine: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    gradient = caught_gradient(engine)
    numbers = engine.train_step(engine.micro_batches(mine), loss_of("actor", batch), WANT)
    return {name: numbers[name] for name in ROUTERS if name in numbers}, on_host(gradient)


def on_a_rank(rank: int, family: str, batch: Batch, routers: RouterSettings, sequence: int) -> Any:
    engine = Engine(FSDPBackend(model_of(family), settings(routers=routers), over_ranks(sequence=sequence)))
    mine = batch if sequence == 2 else batch.rows(torch.tensor(balanced_order(sequence_lengths(batch), 2)[rank]))
    chosen = engine.forward(mine.with_(prompt_experts=None, response_experts=None), LOG_PROBS | EXPERT_COLUMNS)
    columns = {"row": mine.row, "prompt": chosen.prompt_experts, "response": chosen.response_experts}
    return *trained(engine, batch, mine), columns


@pytest.mark.parametrize("sequence", [1, 2], ids=["rows are shared out", "sequences are shared"])
@pytest.mark.parametrize("replay", [False, True], ids=["own choices", "replayed"])
def test_ranks_balance_and_replay_as_one_process_does(ranks, replay, sequence):
    family, routers = "qwen3_moe", RouterSettings(replay=replay, balance=0.5)
    batch = recorded(family, rollouts()) if replay else rollouts()
    plain = Engine(SingleBackend(model_of(family), settings(routers=routers)))
    own = plain.forward(batch.with_(prompt_experts=None, response_experts=None), LOG_PROBS | EXPERT_COLUMNS)
    numbers, gradient = trained(plain, batch, batch)
    for found, got, columns in ranks(on_a_rank, family, batch, routers, sequence):
        assert found == pytest.approx(numbers, rel=1e-4, abs=1e-6)
        scale = max(tensor.abs().max().item() for tensor in gradient.values())
        for name, tensor in gradient.items():
            torch.testing.assert_close(
                got[name], tensor, atol=1e-5 * scale, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert torch.equal(columns["prompt"], own.prompt_experts[columns["row"]])
        assert torch.equal(columns["response"], own.response_experts[columns["row"]])


@pytest.mark.parametrize("family", sorted(SPARSE))
def test_a_rollout_knows_the_experts_of_a_model_whose_weights_are_spread(family):
    """Its engine asks when it is made, while the gathered model is empty."""
    model = model_of(family)
    found = experts_of(GatheredModel.of(model, DEVICE).model)
    assert found == experts_of(model) and found.layers


def uneven_on_a_rank(rank: int, family: str, batch: Batch, routers: RouterSettings) -> Any:
    engine = Engine(FSDPBackend(model_of(family), settings(routers=routers), over_ranks()))
    mine = batch.rows(torch.arange(len(batch) - 1) if rank == 0 else torch.tensor([len(batch) - 1]))
    assert any(len(micro) == 0 for micro in engine.micro_batches(mine)) == (rank == 1)
    found = engine.forward(mine, LOG_PROBS).log_probs
    return *trained(engine, batch, mine), mine.row, found


@pytest.mark.parametrize("balance", [0.0, 0.5])
def test_a_rank_without_rows_in_a_micro_batch_replays_with_the_others(ranks, balance):
    family, routers = "qwen3_moe", RouterSettings(replay=True, balance=balance)
    batch = recorded(family, rollouts())
    plain = Engine(SingleBackend(model_of(family), settings(routers=routers)))
    log_probs = plain.forward(batch, LOG_PROBS).log_probs
    numbers, gradient = trained(plain, batch, batch)
    scale = max(tensor.abs().max().item() for tensor in gradient.values())
    for found, got, rows, theirs in ranks(uneven_on_a_rank, family, batch, routers):
        assert found == pytest.approx(numbers, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(theirs, log_probs[rows], atol=1e-5, rtol=0)
        for name, tensor in gradient.items():
            torch.testing.assert_close(got[name], tensor, atol=1e-5 * scale, rtol=1e-3, msg=name)


def test_sinks_are_shared_out_with_their_heads(ranks):
    batch, routers = rollouts(), RouterSettings()
    _, gradient = trained(Engine(SingleBackend(model_of("gpt_oss"), settings(routers=routers))), batch, batch)
    for _, got, _ in ranks(on_a_rank, "gpt_oss", batch, routers, 2):
        for name, tensor in gradient.items():
            if "sinks" in name:
                torch.testing.assert_close(got[name], tensor, atol=1e-5, rtol=1e-3)
                assert tensor.abs().max() > 0
