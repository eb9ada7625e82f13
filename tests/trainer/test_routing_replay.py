"""Routing replay through the whole loop: experts chosen in rollout, or in the log-prob pass, are the ones trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import EOS, one_turn_each
from tiny_zoo import SPARSE, save, tiny

from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.engines.rollout.base import Prompt, Sampling
from paddock.engines.rollout.embedded import EmbeddedEngine
from paddock.engines.rollout.hf import HFEngine
from paddock.engines.train.engine import Engine
from paddock.engines.train.routers import RouterSettings
from paddock.engines.train.settings import Settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.kernels import native
from paddock.loading.load import load
from paddock.models.attention import NAME
from paddock.models.experts import Routing, experts_of
from paddock.rollouts.batch import with_responses
from paddock.rollouts.episode import Episode
from paddock.rollouts.packed import PackedEpisodes
from paddock.trainer.reinforcement import train

A, RO = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
R3 = [f"{A}.router_replay.mode=R3", f"{RO}.enable_rollout_routing_replay=True"]
R2 = [f"{A}.router_replay.mode=R2"]
FP32 = [f"{A}.fsdp_config.dtype=float32", f"{RO}.dtype=float32"]
SMALL = [
    "data.train_files=builtin:addition/train",
    "data.val_files=builtin:addition/test",
    "data.train_batch_size=4",
    f"{RO}.n=2",
    f"{RO}.response_length=6",
    "data.max_prompt_length=64",
    "data.max_response_length=6",
    "trainer.total_training_steps=2",
    f"{A}.ppo_mini_batch_size=2",
    f"{A}.optim.lr=0.01",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
    "data.dataloader_num_workers=0",
]


def run(folder: Path, model: Path, *overrides: str) -> list[dict[str, float]]:
    arguments = [*SMALL, f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder}", *overrides]
    assert train(load(arguments).config).finished
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def prompts() -> list[Prompt]:
    drawn = torch.randint(4, 260, (5, 9), generator=torch.Generator().manual_seed(0)).tolist()
    return [Prompt(row[: 3 + i], [2 * i, 2 * i + 1]) for i, row in enumerate(drawn)]


def sampling() -> Sampling:
    return Sampling(max_tokens=12, stop_tokens=frozenset({EOS, *range(40, 60)}), seed=0, step=0)


@pytest.mark.parametrize("family", SPARSE)
@torch.no_grad()
def test_what_a_rollout_records_is_what_one_forward_over_the_sequence_chooses(family):
    """Prefill, decode, slots that are left and taken by others: each token's experts end with its own sequence."""
    model = tiny(family)
    model.set_attn_implementation(NAME)
    found = EmbeddedEngine(model, max_num_seqs=3, max_num_batched_tokens=16, record_experts=True).generate(
        prompts(), sampling()
    )
    plain = EmbeddedEngine(model, max_num_seqs=3, max_num_batched_tokens=16).generate(prompts(), sampling())
    assert [one.tokens for one in found] == [one.tokens for one in plain] and plain[0].experts is None
    assert len({len(one.tokens) for one in found}) > 2
    by_row = {row: prompt.tokens for prompt in prompts() for row in prompt.rows}
    for one in found:
        routing = Routing(experts_of(model))
        sequence = torch.tensor([by_row[one.row] + one.tokens[:-1]])
        model(input_ids=sequence, experts=routing)
        want = routing.chosen()
        got = torch.cat([one.experts.prompt, one.experts.response])
        assert torch.equal(got[:-1].sort(-1).values, want.sort(-1).values), one.row
        assert (got[-1] == 0).all() and len(one.experts.response) == len(one.tokens)


def test_the_plain_engine_records_the_same():
    model = tiny("qwen3_moe")
    model.set_attn_implementation(NAME)
    embedded, plain = (
        kind(model, max_num_seqs=4, record_experts=True).generate(prompts(), sampling())
        for kind in (EmbeddedEngine, HFEngine)
    )
    for one, other in zip(embedded, plain, strict=True):
        assert one.tokens == other.tokens
        assert torch.equal(one.experts.prompt, other.experts.prompt)
        assert torch.equal(one.experts.response, other.experts.response)


def test_recorded_experts_travel_between_processes():
    model = tiny("qwen3_moe")
    model.set_attn_implementation(NAME)
    asked = prompts()

    def travelled(**options: bool) -> tuple[list[Episode], list[Episode]]:
        drawn = EmbeddedEngine(model, **options).generate(asked, sampling())
        found = one_turn_each(drawn, asked, range(len(asked)), version=0)
        return found, PackedEpisodes.of(found).unpacked([one.row for one in found])

    found, arrived = travelled(record_experts=True)
    assert [(one.id, one.experts) for one in arrived] == [(one.id, one.experts) for one in found]
    assert [one.spans[0].tokens for one in arrived] == [one.spans[0].tokens for one in found]
    assert {one.experts.response.dtype for one in arrived} == {torch.uint8}
    assert travelled()[1][0].experts is None


def test_a_dense_model_has_nothing_to_record():
    with pytest.raises(UserError, match=r"enable_rollout_routing_replay.*no experts"):
        EmbeddedEngine(tiny("qwen2"), record_experts=True).generate(prompts(), sampling())


@pytest.mark.parametrize(("family", "replay"), [("qwen3_moe", R3), ("deepseek_v3", R2)], ids=["R3", "R2"])
def test_a_run_replays_and_reports_its_routers(family, replay, tmp_path):
    lines = run(tmp_path / "run", save(tmp_path / "model", family), *FP32, f"{A}.entropy_coeff=1.0", *replay)
    for line in lines:
        assert line["actor/router_entropy"] > 0 and line["actor/router_load_max"] >= 1
        assert 0.5 < line["actor/router_replay_agreement"] <= 1  # two updates a step: weights have moved in the second
    assert lines[0]["training/rollout_probs_diff_max"] < 1e-5
    assert lines[-1]["actor/router_replay_agreement"] < 1
    assert all(line["actor/grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_in_bf16_replay_closes_the_gap_that_other_experts_make(family, monkeypatch):
    """Rollout and trainer round differently: some tokens would go to other experts than those of the rollout.

    By the same kernels they might round alike, so the rollout here is without a CPU's own.
    """
    drawn = torch.randint(4, 260, (16, 24), generator=torch.Generator().manual_seed(1))
    asked = [Prompt(row, [4 * i + j for j in range(4)]) for i, row in enumerate(drawn.tolist())]
    rows = Batch(torch.arange(64), torch.arange(64) // 4, drawn.repeat_interleave(4, 0))
    engines = []
    for replay in (False, True):
        model = tiny(family)
        model.set_attn_implementation(NAME)
        bf16 = Settings(compute=torch.bfloat16, optim=OptimConfig(), routers=RouterSettings(replay=replay))
        engines.append(Engine(SingleBackend(model, bf16)))
    with monkeypatch.context() as apart:
        apart.setattr(native, "can_run", lambda *_: False)
        found = EmbeddedEngine(model, record_experts=True).generate(asked, replace(sampling(), max_tokens=24))
    batch = with_responses(rows, one_turn_each(found, asked, range(16), version=0), 0)
    gaps = []
    for engine in engines:
        log_probs = engine.forward(batch, frozenset({"log_probs"})).log_probs
        gaps.append(((log_probs - batch.rollout_log_probs) * batch.mask).abs().max().item())
    assert gaps[1] < 0.15 and gaps[0] > 3 * gaps[1]


def test_the_balancing_loss_of_a_run_is_reported(tmp_path):
    weight = "+actor_rollout_ref.model.override_config.router_aux_loss_coef=0.01"
    for line in run(tmp_path / "run", save(tmp_path / "model", "qwen3_moe"), weight):
        assert 1.9 < line["actor/aux_loss"] < 6  # evenly 2, for the top 2 of 6; 6 where all go to one expert


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([f"{A}.router_replay.mode=R3"], "enable_rollout_routing_replay=True"),
        ([*R2, "algorithm.rollout_correction.bypass_mode=True"], "bypass mode"),
    ],
)
def test_replay_without_a_record_is_refused(overrides, reason):
    with pytest.raises(UserError, match=reason):
        load(overrides)
