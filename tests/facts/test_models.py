"""Shapes are counted exactly: transformers builds every model of the table, without weights, for comparison."""

from __future__ import annotations

import contextlib
import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddock.errors import UserError
from paddock.facts.models import FAMILIES, TABLE, from_config, shape_of, table

ENTRIES = json.loads(TABLE.read_text())
# The sums of the published safetensors files.
PUBLISHED = {
    "Qwen/Qwen2-0.5B": 494_032_768,
    "Qwen/Qwen2-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "deepseek-ai/deepseek-llm-7b-chat": 6_910_365_696,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "THUDM/glm-4-9b-chat": 9_399_951_360,
    "THUDM/GLM-4-9B-0414": 9_400_279_040,
    "THUDM/GLM-4.1V-9B-Thinking": 10_292_777_472,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "google/gemma-2-2b-it": 2_614_341_888,
    "google/gemma-3-4b-it": 4_300_079_472,
    "google/gemma-3-27b-it": 27_432_406_640,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "openai/gpt-oss-20b": 20_914_757_184,
    "ByteDance-Seed/Seed-OSS-36B-Instruct": 36_151_104_512,
}


def config_class(facts: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    values = {key: copy.deepcopy(value) for key, value in facts.items() if key not in ("model_type", "architectures")}
    return AutoConfig.for_model(facts["model_type"], **values)


def true_count(facts: Mapping[str, Any]) -> int:
    """Parameters of the transformers model, built on the meta device: shapes without memory."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    auto: Any = AutoModelForCausalLM
    if "vision_config" in facts:
        auto = AutoModelForImageTextToText
    if "architectures" in facts:
        auto = AutoModelForSequenceClassification
    with torch.device("meta"):
        model = auto.from_config(config_class(facts))
    return sum(parameter.numel() for parameter in model.parameters())


FIRST = {entry["config"]["model_type"]: number for number, entry in reversed([*enumerate(ENTRIES)])}
SOME = [
    pytest.param(entry, marks=() if number in FIRST.values() else pytest.mark.slow, id=entry["names"][0])
    for number, entry in enumerate(ENTRIES)
]
"""One shape of each architecture in the default tests."""


@pytest.mark.parametrize("entry", SOME)
def test_every_bundled_shape_counts_what_transformers_builds(entry: dict[str, Any]) -> None:
    assert from_config(entry["config"]).parameters == true_count(entry["config"])


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_bundled_shapes_reach_the_published_totals(name: str, parameters: int) -> None:
    shape = shape_of(name)
    assert shape is not None and shape.parameters == parameters


def test_latent_attention_and_correction_bias_make_up_deepseeks_published_total() -> None:
    shape = shape_of("deepseek-ai/DeepSeek-V3")
    assert shape is not None
    assert shape.parameters + 58 * 256 == 671_026_419_200  # a buffer of 256 in each of 58 sparse layers is not trained


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-30B-A3B", 3.3),
        ("Qwen/Qwen3-235B-A22B", 22),
        ("Qwen/Qwen1.5-MoE-A2.7B", 2.7),
        ("moonshotai/Moonlight-16B-A3B", 3),
        ("deepseek-ai/DeepSeek-V3", 37),
    ],
)
def test_active_parameters_are_what_the_model_cards_say(name: str, billions: float) -> None:
    shape = shape_of(name)
    assert shape is not None and shape.active_parameters / 1e9 == pytest.approx(billions, rel=0.04)


def test_moonlight_counts_what_its_paper_counts_without_embeddings() -> None:
    """arXiv:2502.16982: 15.29B in all, 2.24B for a token."""
    shape = shape_of("moonshotai/Moonlight-16B-A3B-Instruct")
    assert shape is not None
    tables = 2 * 163_840 * 2048
    assert round((shape.parameters - tables) / 1e9, 2) == 15.29
    assert round((shape.active_parameters - tables) / 1e9, 2) == 2.24


def test_a_vision_tower_is_known_by_depth_width_and_patches() -> None:
    facts = [
        ("Qwen/Qwen2-VL-7B-Instruct", (32, 1280, 5120, 4)),
        ("Qwen/Qwen2.5-VL-7B-Instruct", (32, 1280, 3420, 4)),
        ("Qwen/Qwen3-VL-8B-Instruct", (27, 1152, 4304, 4)),
        ("zai-org/GLM-4.1V-9B-Thinking", (24, 1536, 13696, 4)),
        ("Qwen/Qwen3-8B", (0, 0, 0, 0)),
    ]
    for name, expected in facts:
        shape = shape_of(name)
        assert shape is not None
        found = (shape.vision_depth, shape.vision_width, shape.vision_inner, shape.vision_patches_per_token)
        assert found == expected, name


def test_all_parameters_of_a_dense_model_are_active() -> None:
    shape = shape_of("Qwen/Qwen3-8B")
    assert shape is not None and shape.active_parameters == shape.parameters


@pytest.mark.parametrize(
    "facts",
    [
        {"model_type": "llama", "attention_bias": True},
        {"model_type": "qwen3", "attention_bias": True, "head_dim": 32},
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        | {"mlp_only_layers": [0], "decoder_sparse_step": 2},
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "glm4_moe", "use_qk_norm": True, "attention_bias": True, "head_dim": 16, "n_routed_experts": 4}
        | {"n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 2, "num_experts_per_tok": 2},
        {"model_type": "seed_oss", "attention_bias": True, "attention_out_bias": True, "head_dim": 16},
        {"model_type": "gemma3_text", "attention_bias": True, "head_dim": 24},
    ],
    ids=lambda facts: facts["model_type"],
)
def test_options_the_table_does_not_use_are_counted_exactly(facts: dict[str, Any]) -> None:
    size = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    facts = facts | size | {"intermediate_size": 96, "vocab_size": 512}
    assert from_config(facts).parameters == true_count(facts)


@pytest.mark.parametrize("family", sorted({entry["config"]["model_type"] for entry in ENTRIES}))
def test_a_config_json_written_by_transformers_reads_back(family: str, tmp_path: Path) -> None:
    facts = next(entry["config"] for entry in ENTRIES if entry["config"]["model_type"] == family)
    config_class(facts).save_pretrained(tmp_path)
    read = shape_of(str(tmp_path))
    assert read is not None and read.parameters == from_config(facts).parameters
    assert read.kv_bytes_per_token() == from_config(facts).kv_bytes_per_token()


def test_chatglm_spells_its_keys_its_own_way() -> None:
    own = {
        "model_type": "chatglm",
        "hidden_size": 4096,
        "num_layers": 40,
        "num_attention_heads": 32,
        "multi_query_group_num": 2,
        "kv_channels": 128,
        "ffn_hidden_size": 13696,
        "padded_vocab_size": 151552,
        "seq_length": 131072,
        "add_qkv_bias": True,
    }
    shape = from_config(own)
    assert shape.parameters == 9_399_951_360
    assert shape.max_positions == 131072


def test_gemma_3_leaves_family_defaults_out_of_its_text_config() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    vision = next(entry for entry in ENTRIES if "google/gemma-3-4b-it" in entry["names"])["config"]["vision_config"]
    assert (
        from_config({"model_type": "gemma3", "text_config": text, "vision_config": vision}).parameters == 4_300_079_472
    )


def test_kv_cache_by_hand() -> None:
    qwen, deepseek = shape_of("Qwen/Qwen2-7B"), shape_of("deepseek-ai/DeepSeek-V3")
    assert qwen is not None and deepseek is not None
    assert qwen.kv_bytes_per_token(2) == 28 * 2 * 4 * 128 * 2 == 57_344
    assert deepseek.kv_bytes_per_token(2) == 61 * (512 + 64) * 2
    assert deepseek.kv_bytes_per_token(2, latent=False) == 61 * 128 * (192 + 128) * 2


def test_lora_by_hand() -> None:
    shape = shape_of("HuggingFaceTB/SmolLM2-135M")
    assert shape is not None
    attention = (576 + 576) + 2 * (576 + 192) + (576 + 576)
    assert shape.lora_parameters(8) == 8 * 30 * (attention + 3 * (576 + 1536))
    assert shape.lora_parameters(0) == 0


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2-7B", "Qwen/Qwen1.5-MoE-A2.7B"])
def test_lora_counts_the_adapters_peft_puts_on_all_linear_layers(name: str) -> None:
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    facts = {**table()[name], "num_hidden_layers": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_class(facts))
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert from_config(facts).lora_parameters(4) == trained


def test_a_folder_is_known_by_its_config_before_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen2-7B"
    folder.mkdir()
    facts = dict(table()["HuggingFaceTB/SmolLM2-135M"])
    (folder / "config.json").write_text(json.dumps(facts))
    shape = shape_of(str(folder))
    assert shape is not None and shape.parameters == 134_515_008 and shape.name == str(folder)


def test_paths_expand_variables_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(table()["Qwen/Qwen3-8B"]))
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("$HOME/mine", "~/mine"):
        shape = shape_of(path)
        assert shape is not None and shape.parameters == 8_190_735_360


@pytest.mark.parametrize(
    "path", ["$HOME/models/Qwen2.5-3B-Instruct", "/data/qwen2.5-3b-instruct", "Qwen2.5-3B-Instruct/"]
)
def test_a_folder_named_after_a_model_is_recognised(path: str) -> None:
    shape = shape_of(path)
    assert shape is not None and shape.parameters == 3_085_938_688


def test_the_hub_cache_is_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "hub" / "models--me--tiny"
    for commit, name in (("old", "Qwen/Qwen3-8B"), ("new", "Qwen/Qwen3-14B")):
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(table()[name]))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("old")
    shape = shape_of("me/tiny")
    assert shape is not None and shape.parameters == 8_190_735_360
    (repo / "refs" / "main").write_text("new")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", "/nowhere")
    shape = shape_of("me/tiny")
    assert shape is not None and shape.parameters == 14_768_307_200


def test_an_unknown_model_has_no_shape() -> None:
    assert shape_of("nobody/nothing-9B") is None


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "bert"}', '{"hidden_size": "big"}'])
def test_a_broken_config_is_the_users_to_mend(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError):
        shape_of(str(tmp_path))


KEYS = sorted({key for entry in ENTRIES for key in entry["config"]})
VALUES = (
    st.none() | st.booleans() | st.integers(-2, 2048) | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=2)
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.dictionaries(st.sampled_from(KEYS), VALUES | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4)),
)
def test_no_config_breaks_the_reader(family: str, noise: dict[str, Any]) -> None:
    base = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    with contextlib.suppress(UserError):
        assert from_config(base | noise | {"model_type": family}).parameters >= 0


def test_a_bundled_shape_needs_no_slow_import() -> None:
    code = (
        "import sys; from paddock.facts.models import shape_of; shape_of('Qwen/Qwen2-7B');"
        "print(*{'torch', 'transformers', 'huggingface_hub', 'numpy', 'pyarrow'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out == []
