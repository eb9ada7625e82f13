"""Images over several ranks: what one process trains, two train, also where only one of them has an image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE, on_host
from ranks import Ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

pytest.importorskip("PIL", reason="needs the extra `vision`")

from tiny_updates import over_ranks
from tiny_vision import painted, prompt_of, reader_of, save_tiny_vision, vision_batch

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.core.masked import Denominators, aggregate
from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.embedded.engine import EmbeddedEngine
from paddock.engines.train.engine import Engine
from paddock.engines.train.fsdp import FSDPBackend
from paddock.engines.train.settings import Budget, Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.models.load import load_causal_lm
from paddock.models.vision import freeze_tower

WANT = frozenset({"log_probs"})
GREEDY = Sampling(max_tokens=4, stop_tokens=frozenset({1}), seed=0, step=0, temperature=0.0)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {
        "qwen2_5_vl": save_tiny_vision(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl"),
        "qwen3_vl": save_tiny_vision(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl", **heads),
    }


def settings(**changes: Any) -> Settings:
    optim = OptimConfig(lr=0.01, override_optimizer_config={"eps": 1e-3})
    return Settings(**{"optim": optim, "budget": Budget(90), "forward_budget": Budget(90)} | changes)


def rollouts(folder: Path) -> Batch:
    """Rows 0 and 1 have an image, 2 and 3 none, 4 and 5 two."""
    reader = reader_of(folder)
    two = [painted((0, 255, 0), 32, 16), painted((9, 9, 200), 8, 24)]
    return vision_batch([prompt_of(reader, [painted()]), prompt_of(reader, []), prompt_of(reader, two)])


def policy(folder: Path, frozen: bool) -> Any:
    model = load_causal_lm(str(folder), device=DEVICE)
    if frozen:
        freeze_tower(model, torch.float32)
    return model


def trained(engine: Engine, whole: Batch, mine: list[int]) -> dict[str, Any]:
    denominators = Denominators.count(whole.need("mask"))

    def loss(micro: Batch, outputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return -aggregate(outputs.log_probs, micro.need("mask"), "token-mean", denominators), {}

    rows = whole.rows(torch.tensor(mine, dtype=torch.long))
    numbers = [engine.train_step(engine.micro_batches(rows), loss, WANT) for _ in range(3)]
    return on_host({"numbers": numbers, "weights": {name: tensor.clone() for name, tensor in engine.weights()}})


def train_on_rank(rank: int, folder: Path, frozen: bool, sequence: int, shares: list[list[int]]) -> dict[str, Any]:
    engine = Engine(FSDPBackend(policy(folder, frozen), settings(), over_ranks(sequence=sequence)))
    return trained(engine, rollouts(folder), shares[rank // sequence])


CASES = [
    ("qwen2_5_vl", False, 1, [[0, 2, 4], [1, 3, 5]]),
    ("qwen3_vl", False, 1, [[0, 1, 4, 5], [2, 3]]),  # one rank has no image
    ("qwen3_vl", True, 1, [[0, 1, 2, 3, 4, 5], []]),  # nor a row
    ("qwen3_vl", False, 2, [[0, 1, 2, 3, 4, 5]]),  # slices of the same sequences
]


@pytest.mark.parametrize(("family", "frozen", "sequence", "shares"), CASES)
def test_two_ranks_train_as_one_process_does(ranks, folders, family, frozen, sequence, shares):
    folder = folders[family]
    want = trained(Engine(SingleBackend(policy(folder, frozen), settings())), rollouts(folder), [0, 1, 2, 3, 4, 5])
    for got in ranks(train_on_rank, folder, frozen, sequence, shares):
        for mine, theirs in zip(got["numbers"], want["numbers"], strict=True):
            assert {name: mine[name] for name in theirs} == pytest.approx(theirs, abs=1e-5, rel=1e-4)
        for name, tensor in want["weights"].items():
            torch.testing.assert_close(got["weights"][name], tensor, rtol=0, atol=2e-5, msg=name)


def rollout_on_rank(rank: int, folder: Path) -> list[list[int]]:
    engine = Engine(FSDPBackend(policy(folder, False), settings(), over_ranks()))
    with engine.gathered():
        found = EmbeddedEngine(engine.rollout_model).generate(prompts(folder), GREEDY)
    assert all(isinstance(p, DTensor) for p in engine.model.parameters())
    return [one.tokens for one in found]


def prompts(folder: Path) -> list[Prompt]:
    batch = rollouts(folder)
    rows = [
        (batch.prompts[row][batch.prompt_mask[row] != 0].tolist(), batch.extras["images"][row]) for row in (0, 2, 4)
    ]
    return [Prompt(tokens, [row], images) for row, (tokens, images) in enumerate(rows)]


def test_weights_that_are_spread_answer_as_whole_ones(ranks, folders):
    folder = folders["qwen3_vl"]
    want = EmbeddedEngine(policy(folder, False)).generate(prompts(folder), GREEDY)
    for got in ranks(rollout_on_rank, folder):
        assert got == [one.tokens for one in want]


def padded_on_rank(rank: int, folder: Path) -> str:
    try:
        Engine(FSDPBackend(policy(folder, False), settings(packed=False), over_ranks()))
    except UserError as error:
        return str(error)
    return ""


def test_padded_rows_are_refused_beside_images(ranks, folders):
    assert all("packed rows only" in said for said in ranks(padded_on_rank, folders["qwen2_5_vl"]))
