"""Token budgets and row counts of the config, as each role's model meets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import save_tiny, tiny_batch

from paddock.engines.train.engine import Engine
from paddock.engines.train.open import actor_engine, critic_engine, reference_engine
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.packing import sequence_lengths

A, REF, RO = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
BUDGETS = {
    f"{A}.ppo_max_token_len_per_gpu": 60,
    f"{RO}.log_prob_max_token_len_per_gpu": 50,
    f"{REF}.log_prob_max_token_len_per_gpu": 44,
    "critic.ppo_max_token_len_per_gpu": 56,
    "critic.forward_max_token_len_per_gpu": 40,
}
SWITCHES = (f"{A}.use_dynamic_bsz", f"{RO}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_use_dynamic_bsz")
SHORT = ("data.max_prompt_length=12", "data.max_response_length=12", "trainer.device=cpu")
ACTOR, CRITIC = frozenset({"log_probs"}), frozenset({"values"})


@pytest.fixture
def model(tmp_path: Any) -> list[str]:
    path = save_tiny(tmp_path, "qwen2")
    return [f"actor_rollout_ref.model.path={path}", "algorithm.adv_estimator=gae", *SHORT]


def met(engine: Engine, want: frozenset[str], update: bool) -> list[tuple[int, int]]:
    """(rows, tokens) of every forward."""
    batch, found, inputs = tiny_batch(12), [], engine.backend.inputs

    def watched(micro: Any) -> Any:
        found.append((len(micro), sum(sequence_lengths(micro))))
        return inputs(micro)

    def loss(micro: Any, outputs: Any) -> Any:
        return sum(getattr(outputs, name).sum() for name in want), {}

    engine.backend.inputs = watched  # type: ignore[method-assign]
    if update:
        engine.train_step(engine.micro_batches(batch), loss, want)
    else:
        engine.forward(batch, want)
    del engine.backend.inputs
    assert sum(rows for rows, _ in found) == len(batch)
    return found


def test_every_role_keeps_its_own_token_budget(model):
    settings = [f"{key}={value}" for key, value in BUDGETS.items()]
    config = load([*model, *settings, *(f"{key}=True" for key in SWITCHES), "critic.use_dynamic_bsz=True"]).config
    actor, critic = actor_engine(config, 9), critic_engine(config, 9)
    seen = {
        f"{A}.ppo_max_token_len_per_gpu": met(actor, ACTOR, True),
        f"{RO}.log_prob_max_token_len_per_gpu": met(actor, ACTOR, False),
        f"{REF}.log_prob_max_token_len_per_gpu": met(reference_engine(config), ACTOR, False),
        "critic.ppo_max_token_len_per_gpu": met(critic, CRITIC, True),
        "critic.forward_max_token_len_per_gpu": met(critic, CRITIC, False),
    }
    total = sum(sequence_lengths(tiny_batch(12)))
    for key, parts in seen.items():
        assert max(tokens for _, tokens in parts) <= BUDGETS[key], key
        assert len(parts) <= -(-total // BUDGETS[key]) + 1, key  # and fills it


def test_rows_are_counted_where_tokens_are_not(model):
    counts = {f"{A}.ppo_micro_batch_size_per_gpu": 3, f"{RO}.log_prob_micro_batch_size_per_gpu": 4}
    counts |= {f"{REF}.log_prob_micro_batch_size_per_gpu": 6, "critic.ppo_micro_batch_size_per_gpu": 2}
    switches = [f"{key}=False" for key in (*SWITCHES, "critic.use_dynamic_bsz")]
    config = load([*model, *(f"{key}={value}" for key, value in counts.items()), *switches]).config
    actor, critic = actor_engine(config, 9), critic_engine(config, 9)
    parts = [met(actor, ACTOR, True), met(actor, ACTOR, False)]
    parts += [met(reference_engine(config), ACTOR, False), met(critic, CRITIC, True)]
    assert [{rows for rows, _ in part} for part in parts] == [{3}, {4}, {6}, {2}]


def test_how_a_batch_is_cut_does_not_change_what_comes_out(model):
    wide, narrow = (
        actor_engine(load([*model, f"{A}.ppo_max_token_len_per_gpu={tokens}"]).config, 9) for tokens in (4000, 30)
    )
    batch = tiny_batch(12)
    both = [engine.forward(batch, ACTOR).log_probs for engine in (wide, narrow)]
    torch.testing.assert_close(*both)


def test_a_budget_below_one_sequence_is_refused_by_its_own_key(model):
    for key in BUDGETS:
        with pytest.raises(UserError) as refused:
            load([*model, f"{key}=20", f"{A}.use_kl_loss=True"])
        assert refused.value.key == key


def test_full_determinism_reaches_every_role_and_repeats_to_the_last_bit(model):
    roles = (f"{A}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config")
    config = load([*model, *(f"{role}.full_determinism=True" for role in roles)]).config
    try:
        engines = actor_engine(config, 9), reference_engine(config), critic_engine(config)
        assert all(engine.settings.deterministic for engine in engines)
        assert torch.are_deterministic_algorithms_enabled()
        again = actor_engine(config, 9)
        for engine in (engines[0], again):
            met(engine, ACTOR, True)
        pairs = zip(engines[0].weights(), again.weights(), strict=True)
        assert all(torch.equal(one, other) for (_, one), (_, other) in pairs)
    finally:
        torch.use_deterministic_algorithms(False)
