"""Activations that wait on the host: the same gradients to the last bit, and little left on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import nn

from paddock.config.engine import OptimConfig
from paddock.core.device import CopyStream
from paddock.engines.train.activations import BEHIND, Activations, SavedTensors
from paddock.engines.train.engine import Engine
from paddock.engines.train.settings import Budget, Settings, actor_settings, critic_settings
from paddock.engines.train.single import SingleBackend
from paddock.errors import UserError
from paddock.loading.load import load
from paddock.models.value_head import ValueModel

CPU = torch.device("cpu")
LEAST = 64  # bytes: everything of a tiny model


class Watched(Activations):
    """Remembers its forwards."""

    def __init__(self, model: nn.Module, **kwargs: Any):
        super().__init__(model, CopyStream(CPU), **kwargs)
        self.forwards: list[SavedTensors] = []

    def offloaded(self) -> Any:
        inner = super().offloaded()

        class Noted:
            def __enter__(noted) -> SavedTensors:
                self.forwards.append(inner.__enter__())
                return self.forwards[-1]

            def __exit__(noted, *error: Any) -> Any:
                return inner.__exit__(*error)

        return Noted()


def engine_of(role: str, family: str, checkpointing: bool) -> Engine:
    model: Any = tiny_model(family)
    model.set_attn_implementation("paddock")
    if role == "critic":
        model = ValueModel(model.base_model)
        torch.manual_seed(0)
        nn.init.normal_(model.value_head.weight)
    settings = Settings(optim=OptimConfig(lr=0.01), budget=Budget(24), checkpointing=checkpointing)
    return Engine(SingleBackend(model, settings))


def gradients(engine: Engine, role: str) -> dict[str, torch.Tensor]:
    want = frozenset({"values"}) if role == "critic" else frozenset({"log_probs", "entropy"})

    def loss(micro: Any, outputs: Any) -> Any:
        return sum((getattr(outputs, name) * micro.mask).square().sum() for name in sorted(want)), {}

    engine.model.train()
    engine.updater.zero()
    engine._backward(engine.micro_batches(tiny_batch(6)), loss, want)
    return {name: param.grad.clone() for name, param in engine.model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(("role", "family"), [("actor", "qwen2"), ("actor", "gemma2"), ("critic", "llama")])
def test_gradients_are_the_same_to_the_last_bit(role, family, checkpointing):
    expected = gradients(engine_of(role, family, checkpointing), role)
    engine = engine_of(role, family, checkpointing)
    engine.backend.activations = watched = Watched(engine.model, least=LEAST)
    found = gradients(engine, role)
    assert found.keys() == expected.keys() and len(found) > 5
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    assert len(watched.forwards) == len(engine.micro_batches(tiny_batch(6))) > 1
    for saved in watched.forwards:
        assert len(saved.tensors) >= engine.backend.backbone.config.num_hidden_layers
        assert all(one.uses == 0 and one.on_device is None for one in saved.tensors)  # all came back, none stayed


def test_under_checkpointing_the_inputs_of_layers_travel_and_parameters_never():
    engine = engine_of("actor", "qwen2", checkpointing=True)
    engine.backend.activations = watched = Watched(engine.model, least=LEAST)
    gradients(engine, "actor")
    hidden = engine.backend.backbone.config.hidden_size
    sizes = {param.shape for param in engine.model.parameters()}
    for saved in watched.forwards:
        assert not sizes & {one.shape for one in saved.tensors}
        assert sum(one.shape[-1] == hidden for one in saved.tensors) >= engine.backend.backbone.config.num_hidden_layers


def test_small_tensors_stay():
    engine = engine_of("actor", "qwen2", checkpointing=True)
    engine.backend.activations = watched = Watched(engine.model)
    gradients(engine, "actor")
    assert all(saved.tensors == [] for saved in watched.forwards)


def test_a_tensor_that_is_saved_more_than_once_travels_once():
    x = torch.randn(32, 32, requires_grad=True)
    with Activations(nn.Linear(1, 1), CopyStream(CPU), LEAST).offloaded() as saved:
        y = x * 2
        out = (y.sin() + y.cos() + y.exp()).sum()
    assert len(saved.tensors) == 2  # y, and what exp gave
    out.backward()
    assert torch.equal(x.grad, torch.autograd.grad(((x * 2).sin() + (x * 2).cos() + (x * 2).exp()).sum(), x)[0])


def test_memory_that_became_another_tensors_is_not_taken_for_the_old_one():
    x = torch.ones(64, requires_grad=True)
    with Activations(nn.Linear(1, 1), CopyStream(CPU), LEAST).offloaded() as saved:
        total = x.new_zeros(())
        for step in range(20):  # each product's memory may be the last one's
            total = total + (x * (step + 1.0)).square().sum()
    assert len(saved.tensors) == 20
    total.backward()
    assert torch.equal(x.grad, torch.full((64,), 2.0 * sum((step + 1.0) ** 2 for step in range(20))))


def test_backward_has_as_many_ahead_on_the_device_as_were_leaving():
    layers = [nn.Linear(32, 32) for _ in range(6)]
    with Activations(nn.ModuleList(layers), CopyStream(CPU), LEAST).offloaded() as saved:
        x = torch.randn(16, 32, requires_grad=True)
        for layer in layers:
            x = layer(x.tanh())
    held: list[int] = []
    come_back = saved.fetch

    def watched(one: Any) -> None:
        come_back(one)
        held.append(sum(one.on_device is not None for one in saved.tensors))

    saved.fetch = watched  # type: ignore[method-assign]
    x.sum().backward()
    assert max(held) == 1 + BEHIND < len(saved.tensors)


def test_pinned_memory_is_asked_for_once_and_serves_every_micro_batch():
    engine = engine_of("actor", "qwen2", checkpointing=True)
    engine.backend.activations = Activations(engine.model, CopyStream(CPU), LEAST)
    assert len(engine.micro_batches(tiny_batch(6))) > 1
    gradients(engine, "actor")
    room = {piece.data_ptr() for piece in engine.backend.activations.free}
    gradients(engine, "actor")
    assert {piece.data_ptr() for piece in engine.backend.activations.free} == room
    assert engine.backend.backbone.config.num_hidden_layers < len(room) < 12


def test_a_second_backward_finds_everything_again():
    x = torch.randn(64, requires_grad=True)
    with Activations(nn.Linear(1, 1), CopyStream(CPU), LEAST).offloaded():
        out = (x * 3).sin().sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out, x)[0])


def test_the_config_reaches_the_engines():
    section = ("actor_rollout_ref.model", "critic.model")
    switches = ("enable_activation_offload=True", "enable_gradient_checkpointing=True")
    config = load(["trainer.device=cpu", *(f"{one}.{switch}" for one in section for switch in switches)]).config
    assert actor_settings(config.actor_rollout_ref, CPU).offload_activations
    assert critic_settings(config.critic, None, CPU).offload_activations
    with pytest.raises(UserError) as refused:
        load([f"{section[0]}.enable_activation_offload=True", f"{section[0]}.enable_gradient_checkpointing=False"])
    assert refused.value.key == f"{section[0]}.enable_activation_offload"
