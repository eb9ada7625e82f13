"""Routers in training: replay in every pass, a loss that balances them over a whole mini-batch, and what they show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_single import ALL, LOG_PROBS, assert_near, gradient, policy_loss, rollouts, settings
from tiny_zoo import SPARSE, tiny
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from paddock.commands.preflight import check
from paddock.config.engine import OptimConfig
from paddock.core.batch import Batch
from paddock.engines.train.base import EXPERT_COLUMNS
from paddock.engines.train.engine import Engine
from paddock.engines.train.routers import RouterSettings
from paddock.engines.train.settings import Budget, router_settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.experts import Routing, experts_of
from paddock.models.packing import pack

SPLITS = [[6], [1] * 6, [2, 4]]


def engine(family: str = "qwen3_moe", routers: RouterSettings | None = None, **changes: Any) -> Engine:
    model = tiny(family)
    model.set_attn_implementation("paddock")
    return Engine(SingleBackend(model, settings(routers=routers or RouterSettings(), **changes)))


def recorded(batch: Batch, family: str = "qwen3_moe") -> Batch:
    """With the choices of a policy that is not quite the one that learns."""
    other = engine(family)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    outputs = other.forward(batch, LOG_PROBS | EXPERT_COLUMNS)
    return batch.with_(prompt_experts=outputs.prompt_experts, response_experts=outputs.response_experts)


def by_hand(model: PreTrainedModel, batch: Batch, ids: Tensor | None = None) -> Tensor:
    """E sum_e (C_e / N) (S_e / N) in float64, token by token and layer by layer, in the order of the rows."""
    inputs, logits = pack(batch), []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, found: logits.append(found[0]))
        for layer in model.base_model.layers
    ]
    if ids is not None:
        found = experts_of(model)
        assert found is not None
        inputs = replace(inputs, routing=Routing(found, replay=ids[inputs.cells]))
    inputs.hidden(model)
    for hook in hooks:
        hook.remove()
    chosen, total, tokens = [0.0] * 6, [torch.zeros((), dtype=torch.float64) for _ in range(6)], 0
    for layer, scores in enumerate(logits):
        for token, row in enumerate(scores.double()):
            tokens += 1
            probs = row.softmax(-1)
            cell = int(inputs.cells[token])
            picked = probs.topk(2).indices if ids is None else ids[cell, layer]
            for expert in range(6):
                total[expert] = total[expert] + probs[expert]
                chosen[expert] += float((picked == expert).sum())
    return 6 * sum(c / tokens * s / tokens for c, s in zip(chosen, total, strict=True))


def test_the_balancing_loss_is_that_of_transformers_and_of_a_slow_loop():
    batch = rollouts()
    numbers = engine(routers=RouterSettings(balance=0.1)).train_step([batch], policy_loss(batch), ALL)
    model = tiny("qwen3_moe")
    model.set_attn_implementation("paddock")
    assert numbers["aux_loss"] == pytest.approx(by_hand(model, batch).item(), rel=1e-6)
    logits: list[Tensor] = []
    for layer in model.base_model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, found: logits.append(found[0]))
    pack(batch).hidden(model)
    assert numbers["aux_loss"] == pytest.approx(load_balancing_loss_func(tuple(logits), 6, 2).item(), rel=1e-6)


@pytest.mark.parametrize("replay", [False, True], ids=["own choices", "replayed"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_how_a_batch_is_split_changes_neither_the_balancing_loss_nor_a_gradient(split, replay):
    batch = recorded(rollouts()) if replay else rollouts()
    switched = RouterSettings(replay=replay, balance=0.5)
    ids = torch.cat([batch.prompt_experts, batch.response_experts], 1).flatten(0, 1) if replay else None
    whole, plain = engine(routers=switched), engine(routers=RouterSettings(replay=replay))
    want = {name: g.double() for name, g in gradient(plain, [batch], policy_loss(batch), ALL).items()}
    slow = tiny("qwen3_moe")
    slow.set_attn_implementation("paddock")
    (0.5 * by_hand(slow, batch, ids)).backward()
    for name, parameter in slow.named_parameters():
        if parameter.grad is not None:
            want[name] += parameter.grad.double()
    got = gradient(whole, [batch], policy_loss(batch), ALL)
    assert_near({name: g.double() for name, g in got.items()}, want, 1e-5)
    want = gradient(engine(routers=switched), [batch], policy_loss(batch), ALL)
    parts = [batch.rows(index) for index in torch.arange(6).split(split)]
    assert_near(gradient(engine(routers=switched), parts, policy_loss(batch), ALL), want)
    assert_near(gradient(engine(routers=switched, checkpointing=True), parts, policy_loss(batch), ALL), want)
    assert_near(gradient(engine(routers=switched, packed=False), parts, policy_loss(batch), ALL), want, 1e-5)
    one, many = (engine(routers=switched).train_step(micros, policy_loss(batch), ALL) for micros in ([batch], parts))
    assert many == pytest.approx(one, rel=1e-5, abs=1e-7)
    assert one["aux_loss"] > 0


def test_the_balancing_loss_evens_the_load():
    model, batch = engine(routers=RouterSettings(balance=10.0), optim=OptimConfig(lr=2e-3)), rollouts()
    with torch.no_grad():
        for layer in model.model.base_model.layers:
            layer.mlp.gate.weight[2:] *= 0.2  # the first two experts are loud
    steps = [model.train_step([batch], lambda _, found: (found.log_probs.sum() * 0, {}), ALL) for _ in range(8)]
    assert steps[-1]["aux_loss"] < steps[0]["aux_loss"] - 0.1
    assert steps[-1]["router_load_max"] < steps[0]["router_load_max"]


@pytest.mark.parametrize("family", SPARSE)
def test_replayed_choices_hold_in_every_pass_and_however_rows_are_laid_out(family):
    batch = recorded(rollouts(), family)
    found = []
    for changes in ({}, {"packed": False}, {"forward_budget": Budget(1, rows=1)}):
        outputs = engine(family, RouterSettings(replay=True), **changes).forward(batch, LOG_PROBS | EXPERT_COLUMNS)
        assert torch.equal(outputs.prompt_experts, batch.prompt_experts)
        assert torch.equal(outputs.response_experts, batch.response_experts)
        found.append(outputs.log_probs)
    own = engine(family).forward(batch, LOG_PROBS).log_probs
    assert (own - found[0]).abs().max() > 1e-3
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=2e-5, rtol=1e-5)


def test_what_the_routers_of_a_mini_batch_did_is_reported():
    batch = rollouts()
    model = engine()
    numbers = model.train_step([batch], policy_loss(batch), ALL)
    outputs = engine().forward(batch, LOG_PROBS | EXPERT_COLUMNS)
    table, inputs = torch.cat([outputs.prompt_experts, outputs.response_experts], 1).flatten(0, 1), pack(batch)
    load = torch.stack([torch.bincount(table[inputs.cells, layer].flatten().long(), minlength=6) for layer in (0, 1)])
    assert numbers["router_load_max"] == pytest.approx((load.amax(1) / load.double().mean(1)).max().item())
    assert numbers["router_dead_experts"] == (load == 0).sum()
    assert 0 < numbers["router_entropy"] < torch.tensor(6.0).log()
    assert "router_replay_agreement" not in numbers and "aux_loss" not in numbers


def test_an_expert_that_no_token_goes_to_is_dead():
    model = engine()
    with torch.no_grad():
        model.model.base_model.layers[0].mlp.gate.weight.zero_()  # ties: a top-k picks the same two each time
    numbers = model.train_step([rollouts()], policy_loss(rollouts()), ALL)
    assert numbers["router_dead_experts"] >= 4
    assert numbers["router_load_max"] == pytest.approx(3.0)


def test_agreement_tells_how_many_recorded_experts_the_router_would_choose_again():
    batch = rollouts()
    same = engine().forward(batch, LOG_PROBS | EXPERT_COLUMNS)
    own = batch.with_(prompt_experts=same.prompt_experts, response_experts=same.response_experts)
    replaying = RouterSettings(replay=True)
    assert engine(routers=replaying).train_step([own], policy_loss(own), ALL)["router_replay_agreement"] == 1.0
    other = recorded(batch)
    agreement = engine(routers=replaying).train_step([other], policy_loss(other), ALL)["router_replay_agreement"]
    assert 0.3 < agreement < 1.0


def test_columns_of_experts_are_joined_and_cut_as_others():
    batch = recorded(rollouts())
    halves = [batch.rows(torch.tensor([3, 4, 5])), batch.rows(torch.tensor([0, 1, 2]))]
    wide = recorded(rollouts(prompt_len=9, response_len=12))
    joined = Batch.concat([*halves, wide])
    assert joined.prompt_experts.shape == (12, 9, 2, 2) and joined.response_experts.shape == (12, 12, 2, 2)
    assert torch.equal(joined.prompt_experts[3:6, 2:], batch.prompt_experts[:3])
    assert torch.equal(joined.response_experts[:3, :9], batch.response_experts[3:])


def test_a_dense_model_has_nothing_to_replay():
    from tiny_models import tiny_model

    model = tiny_model()
    model.set_attn_implementation("paddock")
    with pytest.raises(UserError, match="no experts whose choice could be replayed"):
        Engine(SingleBackend(model, settings(routers=RouterSettings(replay=True))))
    assert "router_entropy" not in Engine(SingleBackend(model, settings(routers=RouterSettings()))).train_step(
        [rollouts()], policy_loss(rollouts()), ALL
    )


def test_the_weight_of_the_balancing_loss_is_a_field_of_the_models_config():
    weight = "actor_rollout_ref.model.override_config.router_aux_loss_coef=0.02"
    assert router_settings(load([f"+{weight}"]).config.actor_rollout_ref).balance == 0.02
    assert router_settings(load([]).config.actor_rollout_ref) == RouterSettings()
    with pytest.raises(UserError, match="router_aux_loss_coef"):
        check(load(["+actor_rollout_ref.model.override_config.output_router_logits=True"]).config)
