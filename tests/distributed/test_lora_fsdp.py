"""LoRA over FSDP2 and gloo against one process: the same steps, rollouts, reference and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICE
from ranks import Ranks
from safetensors.torch import load_file
from test_fsdp import assert_equal_runs, part, trained
from tiny_models import tiny_model
from tiny_updates import over_ranks, rollouts, settings
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from paddock.engines.train.engine import Engine, adapter_of
from paddock.engines.train.fsdp import FSDPBackend
from paddock.engines.train.settings import Budget
from paddock.engines.train.single import SingleBackend
from paddock.models.adapters import MERGED, WEIGHTS_FILE, Lora, attach, is_adapter
from paddock.models.value_head import ValueModel

peft = pytest.importorskip("peft")
TOKENS = torch.arange(4, 20)[None]
LORA = Lora(rank=5, alpha=20)  # ranks do not share five rows evenly


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.close()


def model_of(role: str, family: str = "qwen2") -> Any:
    model = tiny_model(family)
    model.set_attn_implementation("paddock")
    return (attach(model, LORA) if role == "actor" else ValueModel(attach(model.base_model, LORA))).to(DEVICE)


def train_on_rank(rank: int, role: str, family: str, changes: dict, shards: dict) -> dict[str, Any]:
    engine = Engine(FSDPBackend(model_of(role, family), settings(**changes), over_ranks(**shards)))
    shares = 2 // engine.backend.placement.sequence
    return trained(engine, role, lambda batch: part(rank // engine.backend.placement.sequence, shares, batch), 7)


CASES = [
    ("actor", "qwen2", {}, {}),
    ("critic", "llama", {"checkpointing": True}, {}),
    ("actor", "qwen3", {}, {"sequence": 2}),
    ("actor", "qwen2", {"packed": False}, {"fsdp_size": 1}),
]


@pytest.mark.parametrize(("role", "family", "changes", "shards"), CASES, ids=str)
def test_two_ranks_train_adapters_as_one_process_does(ranks, role, family, changes, shards):
    single = Engine(SingleBackend(model_of(role, family), settings(**changes)))
    want = trained(single, role, lambda batch: batch, 7)
    assert all(is_adapter(name) or "value_head" in name for name in want["gradient"])
    for got in ranks(train_on_rank, role, family, changes, shards):
        assert_equal_runs(got, want)


def held_on_rank(rank: int) -> dict[str, Any]:
    """In bf16: what is kept wide, what the rollout and the reference see."""
    engine = Engine(FSDPBackend(model_of("actor"), settings(compute=torch.bfloat16), over_ranks()))
    trained(engine, "actor", lambda batch: part(rank, 2, batch), 7, steps=2)
    types = {is_adapter(name): param.dtype for name, param in engine.model.named_parameters()}
    mine = part(rank, 2, rollouts())
    want = frozenset({"log_probs"})
    with engine.gathered():
        logits = engine.rollout_model(input_ids=TOKENS.to(DEVICE)).logits
    return {
        "types": types,
        "logits": logits,
        "rows": mine.row,
        "policy": engine.forward(mine, want).log_probs,
        "reference": engine.without_adapters(Budget(40)).forward(mine, want).log_probs,
        "left": sum(param.numel() for param in engine.rollout_model.parameters()),
        "adapter": adapter_of(engine),
    }


def narrow() -> Any:
    """Parameters alone: rotary frequencies stay wide."""
    model = tiny_model()
    model.set_attn_implementation("paddock")
    for param in model.parameters():
        param.data = param.data.bfloat16()
    return model.to(DEVICE)


def test_a_rollout_sees_the_adapter_and_the_reference_does_not(ranks):
    one, other = ranks(held_on_rank)
    assert one["types"] == {True: torch.float32, False: torch.bfloat16}
    assert torch.equal(one["logits"], other["logits"]) and one["left"] == 0
    plain = Engine(SingleBackend(narrow(), settings(optim=None)))
    expected = plain.forward(rollouts(), frozenset({"log_probs"})).log_probs
    twin = attach(narrow(), LORA, torch.bfloat16)
    twin.load_state_dict(one["adapter"], strict=False)
    assert torch.equal(twin.to(DEVICE)(input_ids=TOKENS.to(DEVICE)).logits.cpu(), one["logits"])
    for found in (one, other):
        torch.testing.assert_close(found["reference"], expected[found["rows"]], atol=0.05, rtol=0)
        assert (found["policy"] - found["reference"]).abs().max() > 0.2


def save_on_rank(rank: int, role: str, folder: str) -> dict[str, Tensor]:
    engine = Engine(FSDPBackend(model_of(role), settings(saves_merged=True), over_ranks()))
    trained(engine, role, lambda batch: part(rank, 2, batch), 7, steps=2)
    engine.save(Path(folder))
    return {name: tensor.clone() for name, tensor in engine.backend.tensors()}


def load_on_rank(rank: int, role: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = Engine(FSDPBackend(model_of(role), settings(), over_ranks()))
    engine.load(Path(folder))
    assert all(isinstance(master, DTensor) for master in engine.updater.masters)
    loaded = {name: tensor.clone() for name, tensor in engine.backend.tensors()}
    return loaded, trained(engine, role, lambda batch: part(rank, 2, batch), 7, steps=1)["weights"]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_checkpoints_hold_the_adapter_and_any_number_of_ranks_reads_them(ranks, role, tmp_path):
    folder = tmp_path / role
    folder.mkdir()
    written = ranks(save_on_rank, role, str(folder))[0]
    stored = load_file(folder / WEIGHTS_FILE)
    assert len(stored) == sum(is_adapter(name) for name in written)
    shared = FileSystemReader(folder / "distributed").read_metadata().state_dict_metadata
    named = {name.removeprefix("model/") for name in shared if name.startswith("model/")}
    assert named == {name for name in written if is_adapter(name) or name.startswith("value_head.")}
    if role == "actor":
        logits = [
            model(TOKENS).logits
            for model in (
                peft.PeftModel.from_pretrained(tiny_model(), folder),
                AutoModelForCausalLM.from_pretrained(folder / MERGED),
            )
        ]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    single = Engine(SingleBackend(model_of(role), settings()))
    single.load(folder)
    assert all(torch.equal(tensor.cpu(), written[name]) for name, tensor in single.backend.tensors())
    after = trained(single, role, lambda batch: batch, 7, steps=1)["weights"]
    single_folder = tmp_path / f"{role}-single"
    again = Engine(SingleBackend(model_of(role), settings()))
    again.load(folder)
    again.save(single_folder)
    for place in (folder, single_folder):
        for loaded, next_weights in ranks(load_on_rank, role, str(place)):
            assert all(torch.equal(loaded[name], written[name]) for name in written)
            for name, tensor in after.items():
                torch.testing.assert_close(next_weights[name], tensor, atol=1e-5, rtol=1e-4)
