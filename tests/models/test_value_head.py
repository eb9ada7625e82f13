"""The critic: a backbone, one number a token, and files that both it and transformers read."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, save_tiny, tiny_batch
from transformers import AutoModel

from paddock.models.load import load_backbone
from paddock.models.packing import pack
from paddock.models.value_head import ValueModel


def critic(folder) -> ValueModel:
    torch.manual_seed(0)
    return ValueModel(load_backbone(str(save_tiny(folder))))


def test_a_fresh_critic_values_everything_at_zero(tmp_path):
    model, inputs = critic(tmp_path), pack(tiny_batch())
    values = model.values(inputs.hidden(model.backbone))
    assert values.shape == inputs.targets.shape and (values == 0).all()


def test_the_head_learns_from_the_first_step(tmp_path):
    model, inputs = critic(tmp_path), pack(tiny_batch())
    model.values(inputs.hidden(model.backbone)).sum().backward()
    assert (model.value_head.weight.grad != 0).any()


def test_values_of_bf16_states_are_float32(tmp_path):
    model = critic(tmp_path)
    torch.nn.init.ones_(model.value_head.weight)
    hidden = torch.randn(3, 48).bfloat16()
    torch.testing.assert_close(model.values(hidden), hidden.float().sum(-1))


def test_saved_and_loaded_it_is_the_same_critic(tmp_path):
    model, inputs = critic(tmp_path / "lm"), pack(tiny_batch())
    torch.nn.init.normal_(model.value_head.weight)
    model.save(tmp_path / "critic")
    again = ValueModel(load_backbone(str(tmp_path / "critic")))
    again.load_head(tmp_path / "critic")
    with torch.no_grad():
        assert torch.equal(*(m.values(inputs.hidden(m.backbone)) for m in (model, again)))
    assert type(AutoModel.from_pretrained(tmp_path / "critic")) is type(model.backbone)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_a_critic(family, tmp_path):
    model, batch = ValueModel(load_backbone(str(save_tiny(tmp_path, family)))), tiny_batch()
    inputs = pack(batch)
    torch.nn.init.ones_(model.value_head.weight)
    values = inputs.per_token(model.values(inputs.hidden(model.backbone)))
    assert (values[batch.mask != 0] != 0).all() and (values[batch.mask == 0] == 0).all()
