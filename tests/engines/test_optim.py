"""Learning rates and optimizers from the config."""

from __future__ import annotations

import math

import pytest
import torch

from paddock.config.engine import OptimConfig
from paddock.engines.train.optim import lr_at, make_optimizer
from paddock.errors import UserError


def rates(steps: int, total: int | None = None, **fields: object) -> list[float]:
    config = OptimConfig(lr=1.0, **fields)
    return [lr_at(step, config, total) for step in range(steps)]


def test_the_warm_up_rises_in_a_line():
    assert rates(6, lr_warmup_steps=4) == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    assert rates(3, lr_warmup_steps=2, lr_warmup_init=0.5) == pytest.approx([0.5, 0.75, 1])
    assert rates(3, total=10, lr_warmup_steps_ratio=0.2) == pytest.approx([0, 0.5, 1])


def test_without_a_warm_up_the_first_step_has_the_full_rate():
    assert rates(2) == [1, 1]
    assert rates(2, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5) == [1, 1]


def test_linear_and_cosine_fall_to_their_floor_and_stay_there():
    linear = rates(8, total=6, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.2)
    assert linear == pytest.approx([0, 0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = rates(6, total=4, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    assert cosine == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * p)) / 2 for p in (0, 0.25, 0.5, 0.75, 1, 1)])


def test_the_length_of_a_decay_can_be_set():
    assert rates(4, lr_scheduler_type="linear", lr_decay_steps=2) == pytest.approx([1, 0.5, 0, 0])
    assert rates(3, total=99, lr_scheduler_type="linear", total_training_steps=2) == pytest.approx([1, 0.5, 0])


def test_a_schedule_without_an_end_is_refused():
    with pytest.raises(UserError, match="the length of the run is not known"):
        rates(1, lr_scheduler_type="cosine")


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_every_optimizer_takes_a_step(name):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(OptimConfig(optimizer=name, lr=0.1), [weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    assert (weight < 1).all()


def test_arguments_of_the_optimizer_pass_through():
    weight = torch.nn.Parameter(torch.ones(1))
    config = OptimConfig(override_optimizer_config={"eps": 0.5}, betas=[0.5, 0.6], weight_decay=0.3)
    group = make_optimizer(config, [weight]).param_groups[0]
    assert (group["eps"], group["betas"], group["weight_decay"]) == (0.5, (0.5, 0.6), 0.3)
    with pytest.raises(UserError, match=r"override_optimizer_config=.*no_such"):
        make_optimizer(OptimConfig(override_optimizer_config={"no_such": 1}), [weight])
