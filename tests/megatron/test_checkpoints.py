"""What a run under Megatron leaves behind: it resumes bit for bit, and any layout or engine starts from its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core: make test-megatron")

import torch
from distributed.ranks import Ranks
from test_layouts import LORA, alone, engine_of, pools, shares
from tiny_updates import WANT, loss_of, rollouts
from torch import Tensor
from transformers import AutoModelForCausalLM

from paddock.core.device import DTYPES
from paddock.errors import UserError
from paddock.models.load import load_backbone
from paddock.models.value_head import ValueModel

BF16 = {"compute": DTYPES["bf16"]}


@pytest.fixture
def two() -> Ranks:
    return pools()[2]


def steps(engine: Any, role: str, numbers: range) -> list[dict[str, float]]:
    mine = shares(engine)
    found = []
    for number in numbers:
        batch = rollouts(7, seed=number)
        found.append(engine.train_step(engine.micro_batches(mine(batch)), loss_of(role, batch), WANT[role]))
    return found


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def resumed_on_rank(rank: int, role: str, family: str, changes: dict, layout: dict, lora: dict | None, folder: Path):
    """(numbers, weights) of a run of four steps, and of one that stopped after two and was read back."""
    whole = engine_of(role, family, layout, changes, lora)
    first = steps(whole, role, range(2))
    whole.save(folder)
    want = steps(whole, role, range(2, 4)), weights(whole)
    again = engine_of(role, family, layout, changes, lora)
    again.load(folder)
    assert first[0]["skipped"] == 0
    return want, (steps(again, role, range(2, 4)), weights(again))


CASES = [
    ("actor", "qwen2-tied", BF16, {}, None),
    ("actor", "qwen3", {}, {"tensor": 2, "sequence": True}, None),
    ("critic", "qwen2-tied", BF16, {"pipeline": 2}, None),
    ("actor", "qwen3_moe", {}, {"expert": 2, "spread_optimizer": False}, None),
    ("actor", "llama", BF16, {"tensor": 2}, LORA),
]


@pytest.mark.parametrize(("role", "family", "changes", "layout", "lora"), CASES, ids=str)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(two, tmp_path, role, family, changes, layout, lora):
    for want, got in two(resumed_on_rank, role, family, changes, layout, lora, tmp_path):
        assert got[0] == want[0]
        assert all(torch.equal(got[1][name], tensor) for name, tensor in want[1].items())


def saved_on_rank(rank: int, role: str, family: str, layout: dict, lora: dict | None, folder: Path) -> dict[str, Any]:
    engine = engine_of(role, family, layout, {}, lora)
    steps(engine, role, range(2))
    engine.save(folder)
    return weights(engine)


@pytest.mark.parametrize(
    ("family", "layout", "lora"),
    [
        ("qwen2-tied", {"tensor": 2, "sequence": True}, None),
        ("qwen3", {"pipeline": 2}, None),
        ("qwen3_moe", {"expert": 2}, None),
        ("llama", {"tensor": 2}, LORA),
    ],
    ids=str,
)
def test_transformers_loads_what_every_layout_saves(two, tmp_path, family, layout, lora):
    one, other = two(saved_on_rank, "actor", family, layout, lora, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    stored = dict(model.named_parameters())
    assert one.keys() == other.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(tensor, one[name]) and torch.equal(tensor, other[name]), name


def test_a_saved_critic_has_its_head_beside_it(two, tmp_path):
    one, _ = two(saved_on_rank, "critic", "qwen3", {"pipeline": 2}, None, tmp_path)
    critic = ValueModel(load_backbone(str(tmp_path)))
    critic.load_head(tmp_path)
    stored = dict(critic.named_parameters())
    assert stored.keys() == one.keys() and stored["value_head.weight"].abs().sum() > 0
    assert all(torch.equal(tensor, one[name]) for name, tensor in stored.items())


def test_another_layout_is_told_how_to_start_from_the_weights(two, tmp_path):
    two(saved_on_rank, "actor", "qwen2-tied", {"tensor": 2}, None, tmp_path)
    with pytest.raises(UserError, match=r"(?s)another layout.*actor_rollout_ref.model.path"):
        alone("actor", "qwen2-tied").load(tmp_path)
