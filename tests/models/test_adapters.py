"""LoRA adapters in a transformers model: where they stand, what they change, and that peft reads what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from tiny_vision import FAMILIES as VISION
from tiny_vision import tiny_vision_model
from tiny_zoo import tiny
from torch import nn
from transformers import AutoModelForCausalLM

from paddock.config.roles import CriticModelConfig, ModelConfig
from paddock.errors import UserError
from paddock.models.adapters import (
    WEIGHTS_FILE,
    Adapters,
    Lora,
    adapters_of,
    adapters_on,
    attach,
    is_adapter,
    with_adapter,
)

peft = pytest.importorskip("peft")
TOKENS = torch.arange(4, 24).view(2, 10)
LORA = Lora(rank=4, alpha=8)


def adapted(family: str = "qwen2", lora: Lora = LORA, change: float = 0.1, **overrides: Any) -> Any:
    """A tiny model whose adapters do something."""
    model = attach(tiny_model(family, **overrides), lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_B." in name:
                param.copy_(torch.randn(param.shape, generator=generator) * change)
    return model


def found(model: Any) -> Adapters:
    adapters = adapters_of(model)
    assert adapters is not None
    return adapters


def saved(model: Any, folder: Path) -> Path:
    found(model).save(folder, {name: param for name, param in model.named_parameters() if is_adapter(name)})
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_adapter_changes_nothing_and_one_that_is_off_neither_bit_for_bit(family):
    base = logits(tiny_model(family))
    assert torch.equal(logits(attach(tiny_model(family), LORA)), base)
    model = adapted(family)
    assert (logits(model) - base).abs().max() > 0.05
    with found(model).off():
        assert torch.equal(logits(model), base)
    assert not torch.equal(logits(model), base)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_is_every_linear_layer_but_the_head_and_only_adapters_are_trained(family):
    model, plain = adapted(family), tiny_model(family)
    linear = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert set(found(model).layers) == linear - {"lm_head"}
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
    assert len(trained) == 2 * len(found(model).layers)


@pytest.mark.parametrize(
    ("targets", "excluded", "kinds"),
    [
        (["q_proj", "v_proj"], None, {"q_proj", "v_proj"}),
        ("q_proj", None, {"q_proj"}),
        (r".*self_attn\.[qv]_proj", None, {"q_proj", "v_proj"}),
        ("all-linear", ["mlp.down_proj", "o_proj"], {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
        ("all-linear", r".*\.mlp\..*", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_targets_and_exclusions_are_names_or_patterns(targets, excluded, kinds):
    layers = found(adapted(lora=Lora(rank=2, targets=targets, excluded=excluded))).layers
    assert {name.rpartition(".")[2] for name in layers} == kinds
    assert len(layers) == 2 * len(kinds)


def test_one_layer_alone_can_be_named():
    lora = Lora(rank=2, targets=["model.layers.1.self_attn.q_proj"])
    assert list(found(adapted(lora=lora)).layers) == ["model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize("family", VISION)
def test_all_linear_leaves_an_image_tower_alone_unless_it_is_named(family):
    layers = found(attach(tiny_vision_model(family), LORA)).layers
    assert layers and all(name.startswith("model.language_model.") for name in layers)
    named = found(attach(tiny_vision_model(family), Lora(rank=4, targets=r".*visual.*"))).layers
    assert named and all(name.startswith("model.visual.") for name in named)


def test_experts_that_share_a_name_with_linear_layers_stay_as_they_are():
    """One tensor of all experts: adapters stand beside attention, shared experts and dense layers."""
    model, plain = attach(tiny("deepseek_v3"), LORA), tiny("deepseek_v3")
    linear = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    assert set(found(model).layers) == linear
    assert any("shared_experts.gate_proj" in name for name in linear)


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_are_those_of_peft_and_give_the_same_logits(family, tmp_path):
    model = adapted(family)
    merged = dict(found(model).merged((name, param.detach()) for name, param in model.named_parameters()))
    plain = tiny_model(family)
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-4, rtol=0)
    theirs = peft.PeftModel.from_pretrained(tiny_model(family), saved(model, tmp_path)).merge_and_unload()
    for name, param in theirs.named_parameters():
        torch.testing.assert_close(merged[name], param.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_in_place_the_model_is_the_merged_one_and_afterwards_what_it_was_also_after_an_error(dtype):
    model = adapted().to(dtype)
    adapters, plain = found(model), tiny_model().to(dtype)
    plain.load_state_dict(dict(adapters.merged(model.state_dict().items())))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {name: param.data_ptr() for name, param in model.named_parameters()}
    own = logits(model)
    with adapters.in_weights():
        assert torch.equal(logits(model), logits(plain)) and not adapters_on(model)
        assert places == {name: param.data_ptr() for name, param in model.named_parameters()}
    with pytest.raises(KeyboardInterrupt), adapters.in_weights():
        raise KeyboardInterrupt
    layer = list(adapters.layers.values())[-1]
    layer.scaling, scaling = {}, layer.scaling
    with pytest.raises(KeyError), adapters.in_weights():
        pytest.fail("the last layer cannot be merged")
    layer.scaling = scaling
    assert adapters_on(model) and all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(logits(model), own)


def test_whether_adapters_are_on_is_known():
    model = adapted()
    with found(model).off():
        assert not adapters_on(model)
    assert adapters_on(model) and not adapters_on(tiny_model())


def test_by_hand_a_layer_gives_wx_plus_alpha_over_r_bax():
    model, plain = adapted(), tiny_model()
    layer, x = found(model).layers["model.layers.0.mlp.up_proj"], torch.randn(3, 48)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = plain.model.layers[0].mlp.up_proj(x) + 8 / 4 * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_peft_and_transformers_load_what_is_saved(family, tmp_path):
    plain = tiny_model(family)
    plain.save_pretrained(tmp_path / "base")
    model = adapted(family, Lora(rank=4, alpha=8, base=str(tmp_path / "base")))
    saved(model, tmp_path / "adapter")
    assert torch.equal(logits(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")), logits(model))
    assert torch.equal(logits(peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), logits(model))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")), logits(model))


def test_what_peft_saves_is_an_adapter_to_start_from(tmp_path):
    config = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    theirs = peft.get_peft_model(tiny_model(), config)
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            if "lora_B" in name:
                param.normal_()
    theirs.save_pretrained(tmp_path)
    theirs.eval()
    ours = attach(tiny_model(), Lora(start=tmp_path))
    assert torch.equal(logits(ours), logits(theirs))
    assert torch.equal(logits(ours.train()), logits(theirs))  # no dropout in training
    assert (found(ours).rank, found(ours).config.lora_alpha) == (3, 12)
    assert all(param.requires_grad == is_adapter(name) for name, param in ours.named_parameters())


def test_a_saved_adapter_can_be_merged_into_its_model(tmp_path):
    model = adapted()
    plain = tiny_model()
    plain.load_state_dict(with_adapter(tiny_model(), saved(model, tmp_path)))
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-4, rtol=0)


def test_the_first_values_follow_from_the_seed_and_disturb_no_generator():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, same, other = (attach(tiny_model(), Lora(rank=4, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) != (".lora_A." in name), name


def test_adapters_are_kept_wide_beside_narrow_weights():
    model = attach(tiny_model().to(torch.bfloat16), LORA)
    assert {param.dtype for name, param in model.named_parameters() if is_adapter(name)} == {torch.float32}
    assert {param.dtype for name, param in model.named_parameters() if not is_adapter(name)} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (Lora(rank=2, targets=["q_proj", "v_prj"]), ["target_modules=v_prj", "did you mean 'v_proj'?"]),
        (Lora(rank=2, targets="nothing"), ["target_modules=nothing", "no linear layer of that name", "all-linear"]),
        (Lora(rank=2, targets=["q_proj", "lm_head"]), ["target_modules=lm_head", "the head gets no adapter"]),
        (Lora(rank=2, targets=["embed_tokens"]), ["target_modules=embed_tokens", "no linear layer"]),
        (Lora(rank=2, excluded=".*"), ["exclude_modules=.*", "no layer is left"]),
        (Lora(rank=2, targets=["(q_proj"]), ["target_modules=(q_proj"]),
    ],
)
def test_layers_that_cannot_get_an_adapter_are_named(lora, words):
    with pytest.raises(UserError) as error:
        attach(tiny_model(tie_word_embeddings=False), lora)
    assert all(word in str(error.value) for word in ["actor_rollout_ref.model.", *words])


def test_an_exclusion_of_nothing_is_said(caplog):
    attach(tiny_model(), Lora(rank=2, excluded=["visual"]))
    assert "exclude_modules=['visual'] names no layer" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 8}, ["lora_rank=8", "has rank 4", "lora_rank=4"]),
        ({"alpha": 64}, ["lora_alpha=64", "has alpha 8"]),
        ({"targets": ["q_proj"]}, ["target_modules=['q_proj']", "says itself where it stands"]),
        ({"excluded": "o_proj"}, ["exclude_modules=o_proj", "says itself where it stands"]),
        ({"hidden_size": 32, "head_dim": 8}, ["lora_adapter_path=", "another model", "is [4, 48], not [4, 32]"]),
        ({"num_hidden_layers": 3}, ["lora_adapter_path=", "another model", "layers.2."]),
    ],
)
def test_an_adapter_to_start_from_must_fit_the_model_and_the_keys(change, words, tmp_path):
    saved(adapted(), tmp_path)
    keys = {name: change[name] for name in ("rank", "alpha", "targets", "excluded") if name in change}
    shape = {name: value for name, value in change.items() if name not in keys}
    with pytest.raises(UserError) as error:
        attach(tiny_model(**shape), Lora(start=tmp_path, **keys))
    assert all(word in str(error.value) for word in words)


def test_what_is_no_plain_adapter_is_refused(tmp_path):
    for folder, reason in ((tmp_path / "none", "no such folder"), (tmp_path, "nothing")):
        with pytest.raises(UserError, match=f"is not a saved adapter: {reason}"):
            attach(tiny_model(), Lora(start=folder))
    folder = saved(adapted(), tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, reason in (
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, "biases"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=f"is not plain LoRA: .*{reason}"):
            attach(tiny_model(), Lora(start=folder))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / WEIGHTS_FILE).write_bytes(b"half a file")
    with pytest.raises(UserError, match=WEIGHTS_FILE):
        attach(tiny_model(), Lora(start=folder))


@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
def test_an_adapter_of_the_head_or_the_embedding_is_refused(end, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", end])
    peft.get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(UserError, match="changes the embedding or the head"):
        attach(tiny_model("llama"), Lora(start=tmp_path))


def test_keys_of_a_role_become_adapters_or_none(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert Lora.of(ModelConfig(path=str(tmp_path)), "actor_rollout_ref.model", 1) is None
    assert Lora.of(CriticModelConfig(path=str(tmp_path)), "critic.model", 1) is None
    lora = Lora.of(
        ModelConfig(path=str(tmp_path), lora_rank=8, exclude_modules=["o_proj"]), "actor_rollout_ref.model", 1
    )
    assert lora == Lora(rank=8, alpha=16, excluded=["o_proj"], base=str(tmp_path.resolve()), seed=1)
    assert Lora.of(CriticModelConfig(path="Qwen/Qwen3-0.6B", lora_rank=8), "critic.model", 1).base == "Qwen/Qwen3-0.6B"
