"""Models and tokenizers from folders and names, and the errors that a wrong one deserves."""

from __future__ import annotations

import json
import time

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, byte_tokenizer, save_tiny, tiny_model
from transformers import PreTrainedModel

import paddock.models.load as module
from paddock.errors import UserError
from paddock.models.load import load_backbone, load_causal_lm, load_config, load_tokenizer, model_folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_its_weights_back(family, tmp_path):
    model = load_causal_lm(str(save_tiny(tmp_path, family)))
    assert isinstance(model, PreTrainedModel) and not model.training
    assert model.config._attn_implementation == "paddock"
    expected = dict(tiny_model(family).named_parameters())
    assert {name for name, _ in model.named_parameters()} == set(expected)
    assert all(torch.equal(param, expected[name]) for name, param in model.named_parameters())


def test_the_type_of_the_weights_is_chosen(tmp_path):
    model = load_causal_lm(str(save_tiny(tmp_path)), dtype=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_a_backbone_has_no_head(tmp_path):
    backbone = load_backbone(str(save_tiny(tmp_path, "llama")))
    expected = dict(tiny_model("llama").base_model.named_parameters())
    assert all(torch.equal(param, expected[name]) for name, param in backbone.named_parameters())
    assert not any("lm_head" in name for name, _ in backbone.named_parameters())


def test_fields_of_the_config_can_be_overridden(tmp_path):
    folder = str(save_tiny(tmp_path))
    assert load_config(folder, override_config={"rms_norm_eps": 0.5}).rms_norm_eps == 0.5
    with pytest.raises(
        UserError, match=r"override_config\.rms_norm_epsilon=0\.5: qwen2 .* did you mean 'rms_norm_eps'"
    ):
        flat(load_config, folder, override_config={"rms_norm_epsilon": 0.5})


def flat(call, *args, **kwargs):
    """Calls, with the error's lines joined."""
    try:
        return call(*args, **kwargs)
    except UserError as error:
        raise UserError(str(error).replace("\n", " ")) from None


def test_dropout_is_off(tmp_path):
    save_tiny(tmp_path, "llama", attention_dropout=0.1)
    assert load_config(str(tmp_path)).attention_dropout == 0.0


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=r"model\.path=/no/such/folder: no such folder"):
        model_folder("/no/such/folder")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=r"no config.json: it holds notes\.txt"):
        model_folder(str(tmp_path))


def test_a_hub_that_cannot_be_reached_is_an_answer_not_a_wait(monkeypatch):
    def unreachable(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    start = time.perf_counter()
    with pytest.raises(UserError, match=r"critic\.model\.path=Some/Model: .*the hub cannot be reached"):
        load_causal_lm("Some/Model", key="critic.model.path")
    assert time.perf_counter() - start < 1


def test_a_builtin_model_is_a_folder_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ASSETS", tmp_path)
    save_tiny(tmp_path / "tiny")
    assert model_folder("builtin:tiny") == tmp_path / "tiny"
    with pytest.raises(UserError, match=r"builtin:tinny: no such model in the package\n.*did you mean 'tiny'"):
        model_folder("builtin:tinny")


def test_missing_tensors_are_an_error_not_random_weights(tmp_path):
    save_tiny(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 tensors .*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_causal_lm(str(tmp_path))


def test_a_broken_config_is_the_users_to_mend(tmp_path):
    save_tiny(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    with pytest.raises(UserError, match="no_such_family"):
        load_causal_lm(str(tmp_path))


def test_a_tokenizer_pads_with_its_end_where_it_has_no_pad(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(save_tiny(tmp_path, "llama"))
    loaded = load_tokenizer(str(tmp_path), chat_template="{{ messages[0]['content'] }}!")
    assert loaded.pad_token_id == loaded.eos_token_id and loaded.padding_side == "left"
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert loaded.decode(loaded("1 + 1 = ü").input_ids) == "1 + 1 = ü"
