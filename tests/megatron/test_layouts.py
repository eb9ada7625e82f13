"""Megatron's layers over gloo against one process: the same numbers, gradients, weights and checkpoints."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core: make test-megatron")

import on_cpu
import torch
import torch.distributed as dist
from devices import on_host
from distributed.ranks import Ranks
from tiny_models import tiny_batch, tiny_model
from tiny_updates import WANT, in_role, loss_of, rollouts, settings
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from paddock.config.roles import LoraConfig
from paddock.core.balance import balanced_order
from paddock.core.batch import Batch
from paddock.engines.train.engine import Engine, offload_idle
from paddock.engines.train.offload import offloads_of
from paddock.engines.train.settings import Budget
from paddock.engines.train.single import SingleBackend
from paddock.models.packing import sequence_lengths

STEPS = 3
SHAPE: dict[str, Any] = {
    "vocab_size": 265,  # odd: the parts of a vocabulary are not equal
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,  # of what turns
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
EXPERTS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, norm_topk_prob=True, tie_word_embeddings=False),
    "qwen2_moe": Qwen2MoeConfig(**SHAPE, num_experts=4, shared_expert_intermediate_size=40, mlp_only_layers=[0]),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "deepseek_v3": DeepseekV3Config(**SHAPE | LATENT, n_group=2, topk_group=1, q_lora_rank=24, rope_interleave=True),
    "moonlight": DeepseekV3Config(**SHAPE | LATENT, n_group=1, topk_group=1, q_lora_rank=None, rope_interleave=False),
    "glm4_moe": Glm4MoeConfig(**SHAPE, n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1,
                              routed_scaling_factor=1.5, use_qk_norm=True),
}  # fmt: skip


@cache
def pools() -> dict[int, Ranks]:
    """Two ranks and four, for all files of this folder. They end with this process, and begin before an engine of its
    own makes a process group: a fork would have the group and not its threads."""
    assert not dist.is_initialized(), "tests of several ranks come before those that join a group in this process"
    return {size: Ranks(size) for size in (2, 4)}


@pytest.fixture
def two() -> Ranks:
    return pools()[2]


@pytest.fixture
def four() -> Ranks:
    return pools()[4]


def plain_model(family: str) -> Any:
    if family not in EXPERTS:
        return tiny_model(family.removesuffix("-tied"), tie_word_embeddings=family.endswith("-tied"), vocab_size=265)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(EXPERTS[family], dtype=torch.float32).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
    return model


def model_of(role: str, family: str) -> Any:
    return in_role(plain_model(family), role)


def engine_of(
    role: str,
    family: str,
    layout: dict[str, Any],
    changes: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
) -> Any:
    """In this process, with the groups that this layout asks for."""
    on_cpu.patch()
    from megatron.core import parallel_state

    from paddock.engines.train.megatron.backend import MegatronBackend
    from paddock.engines.train.megatron.layout import Layout

    parallel_state.destroy_model_parallel()
    asked = LoraConfig(**lora) if lora else None
    return Engine(MegatronBackend(model_of(role, family), settings(**changes or {}), Layout(**layout), lora=asked))


def gradients(engine: Any) -> dict[str, Tensor]:
    """After they are summed, under Hugging Face's names: the way that weights take."""
    if not hasattr(engine.backend, "mapping"):
        return {name: master.grad.clone() for name, master in engine.updater.named_masters().items()}
    kept = []
    for buffer in engine.updater.buffers:
        kept.append(buffer.values.clone())
        whole = [torch.empty_like(buffer.master.grad) for _ in range(buffer.shares)]
        if buffer.shares > 1:
            dist.all_gather(whole, buffer.master.grad, group=buffer.replicas)
        buffer.values.copy_(torch.cat(whole) if buffer.shares > 1 else buffer.master.grad)
    found = {name: tensor.clone() for name, tensor in engine.weights() if "e_score" not in name}
    for buffer, values in zip(engine.updater.buffers, kept, strict=True):
        buffer.values.copy_(values)
    return found


def trained(engine: Any, role: str, mine: Any, rows: int, steps: int = STEPS) -> dict[str, Any]:
    """Numbers, last gradient and weights after some steps; `mine` picks this rank's rows of a batch."""
    gradient: dict[str, Tensor] = {}
    clip = engine.updater.clip

    def catch() -> Tensor:
        norm = clip()
        gradient.update(gradients(engine))
        return norm

    engine.updater.clip = catch
    numbers = []
    for step in range(steps):
        batch = rollouts(rows, seed=step)
        engine.move("device")
        numbers.append(engine.train_step(engine.micro_batches(mine(batch)), loss_of(role, batch), WANT[role]))
        engine.move("host")
    engine.move("device")
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    return on_host({"numbers": numbers, "gradient": gradient, "weights": weights})


def shares(engine: Any) -> Any:
    """Which rows are this rank's: ranks of one replica have the same."""
    ranks, layout = engine.backend.ranks, engine.backend.layout
    count, alike = dist.get_world_size() // ranks.stages, layout.tensor * layout.context
    number = dist.get_rank() % count // alike

    def mine(batch: Batch) -> Batch:
        parts = balanced_order(sequence_lengths(batch), count // alike)
        return batch.rows(torch.tensor(parts[number], dtype=torch.long))

    return mine


def train_on_rank(rank: int, role: str, family: str, changes: dict, layout: dict, rows: int) -> dict[str, Any]:
    engine = engine_of(role, family, layout, changes)
    offload_idle(engine, least=1)  # what the settings name, as on a GPU
    found = trained(engine, role, shares(engine), rows)
    assert all(offload.sent and offload.fetched for offload in offloads_of(engine))
    return found


def assert_equal_runs(got: dict[str, Any], want: dict[str, Any], tolerance: float = 2e-5) -> None:
    for mine, theirs in zip(got["numbers"], want["numbers"], strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            assert mine[name] == pytest.approx(theirs[name], abs=tolerance, rel=tolerance), name
    for what in ("gradient", "weights"):
        assert got[what].keys() == want[what].keys()
        largest = max([1.0, *(tensor.abs().max().item() for tensor in want[what].values())])
        for name, tensor in want[what].items():
            distance = (got[what][name] - tensor).abs().max().item()
            assert distance <= tolerance * largest, f"{what} {name}: {distance}"


def compare(pool: Ranks, role: str, family: str, changes: dict, layout: dict, rows: int) -> None:
    want = trained(Engine(SingleBackend(model_of(role, family), settings(**changes))), role, lambda batch: batch, rows)
    for got in pool(train_on_rank, role, family, changes, layout, rows):
        assert_equal_runs(got, want)


TWO = [
    ("actor", "qwen2-tied", {}, {}, 7),  # two replicas, which share the optimizer's state
    ("actor", "qwen2", {}, {"spread_optimizer": False}, 1),  # one replica has no rows
    ("actor", "llama", {}, {"tensor": 2}, 7),
    ("actor", "qwen2-tied", {}, {"tensor": 2, "sequence": True}, 7),
    ("actor", "qwen3", {"checkpointing": True}, {"tensor": 2, "sequence": True}, 7),
    ("critic", "qwen3", {}, {"tensor": 2, "sequence": True}, 7),
    ("actor", "qwen3", {}, {"pipeline": 2}, 7),
    ("actor", "qwen2-tied", {"budget": Budget(64, rows=2)}, {"pipeline": 2}, 7),  # the ends share a matrix
    ("critic", "qwen2-tied", {}, {"pipeline": 2}, 7),
    ("actor", "mistral", {}, {"context": 2}, 7),
    ("critic", "llama", {"offload_params": True, "offload_optimizer": True}, {"context": 2}, 7),
    ("actor", "qwen3_moe", {}, {"expert": 2}, 7),
    ("actor", "qwen2_moe", {}, {"expert": 2}, 7),
    ("actor", "glm4_moe", {}, {"expert": 2}, 1),
    ("actor", "deepseek_v3", {}, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}, 7),
    ("actor", "moonlight", {}, {"pipeline": 2}, 7),
    ("actor", "mixtral", {}, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}, 7),
    ("actor", "qwen3_moe", {}, {"tensor": 2, "sequence": True, "expert_tensor": 2}, 7),
]
FOUR = [
    ("actor", "qwen2-tied", {}, {"tensor": 2, "sequence": True, "pipeline": 2}, 7),
    ("actor", "qwen3", {"checkpointing": True}, {"tensor": 2, "sequence": True}, 7),
    ("actor", "qwen3_moe", {}, {"pipeline": 2, "expert": 2}, 7),
]


@pytest.mark.parametrize(("role", "family", "changes", "layout", "rows"), TWO, ids=str)
def test_two_ranks_train_as_one_process_does(two, role, family, changes, layout, rows):
    compare(two, role, family, changes, layout, rows)


@pytest.mark.parametrize(("role", "family", "changes", "layout", "rows"), FOUR, ids=str)
def test_four_ranks_train_as_one_process_does(four, role, family, changes, layout, rows):
    compare(four, role, family, changes, layout, rows)


def alone(role: str, family: str, lora: dict[str, Any] | None = None, **changes: Any) -> Any:
    """The engine in this process, without others."""
    return engine_of(role, family, {}, changes, lora)


@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "qwen3", "mistral", *EXPERTS])
def test_log_probs_are_those_of_transformers_and_weights_come_back_exactly(family):
    engine, model, batch = alone("actor", family), plain_model(family), tiny_batch(4)
    names = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    if not family.endswith("-tied"):
        names["lm_head.weight"] = model.lm_head.weight
    got = on_host(dict(engine.weights()))
    assert got.keys() == names.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in names.items())
    found = engine.forward(batch, frozenset({"log_probs"})).log_probs
    for row in range(len(batch)):
        prompt = batch.prompts[row][batch.prompt_mask[row] == 1]
        response = batch.responses[row][: batch.lengths[row]]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(found[row, : len(response)], want, atol=1e-5, rtol=0)


LORA = {"rank": 4, "alpha": 8}


def lora_on_rank(rank: int, family: str, changes: dict, layout: dict, role: str = "actor") -> dict[str, Any]:
    engine = engine_of(role, family, layout, changes, LORA)
    mine = shares(engine)
    numbers = []
    for step in range(STEPS):
        batch = rollouts(7, seed=step)
        numbers.append(engine.train_step(engine.micro_batches(mine(batch)), loss_of(role, batch), WANT[role]))
    return on_host({"numbers": numbers, "weights": {n: t.clone() for n, t in engine.weights()}, "gradient": {}})


@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        ("qwen2-tied", {}, {"tensor": 2}),
        ("qwen3", {"checkpointing": True}, {"tensor": 2, "sequence": True}),
        ("moonlight", {}, {"pipeline": 2}),
        ("qwen3_moe", {}, {"expert": 2}),
    ],
    ids=str,
)
def test_adapters_train_alike_in_every_layout(two, family, changes, layout):
    """From the same first A, which a layer's name alone decides; all that is frozen stays."""
    one = lora_on_rank_alone(family, changes)
    for got in two(lora_on_rank, family, changes, layout):
        assert_equal_runs(got, one)
    start = plain_model(family).state_dict()
    moved = {name for name, tensor in one["weights"].items() if not torch.equal(tensor, start[name])}
    assert moved and all("proj" in name for name in moved)


def lora_on_rank_alone(family: str, changes: dict) -> dict[str, Any]:
    on_cpu.patch()
    alone("actor", family)  # joins
    return lora_on_rank(0, family, changes, {})


def test_the_reference_under_adapters_is_the_frozen_model_and_the_rollout_sees_the_merged_one():
    engine, batch = alone("actor", "qwen3", LORA), rollouts()
    want = engine.forward(batch, frozenset({"log_probs"})).log_probs
    for _ in range(2):
        engine.train_step(engine.micro_batches(batch), loss_of("actor", batch), WANT["actor"])
    reference = engine.without_adapters(Budget(40))
    assert torch.equal(reference.forward(batch, frozenset({"log_probs"})).log_probs, want)
    now = engine.forward(batch, frozenset({"log_probs"})).log_probs
    assert (now - want).abs().max() > 1e-3
    merged = tiny_model("qwen3", tie_word_embeddings=False, vocab_size=265)
    merged.load_state_dict(dict(engine.weights()))
    merged.set_attn_implementation("paddock")
    plain = Engine(SingleBackend(merged, settings(optim=None))).forward(batch, frozenset({"log_probs"})).log_probs
    torch.testing.assert_close(now, plain, atol=1e-5, rtol=0)
