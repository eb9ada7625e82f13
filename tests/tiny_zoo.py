"""A tiny model with random weights of every family of language models that the recipes name, dense and of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import ALTERNATING, FAMILIES, SHAPE, WINDOW, byte_tokenizer
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    MiniCPM3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,  # not that of queries and keys
}

DENSE: dict[str, tuple[type, dict[str, Any]]] = {
    **FAMILIES,
    "mistral_nemo": (MistralConfig, {"head_dim": 20, "sliding_window": None, "tie_word_embeddings": False}),
    "ministral": (MinistralConfig, {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "glm": (GlmConfig, {}),
    "glm4": (Glm4Config, {}),
    "seed_oss": (SeedOssConfig, {}),
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0], "head_dim": None}),
    "phi3": (Phi3Config, {"head_dim": None}),
    "olmo2": (Olmo2Config, {"head_dim": None}),
    "minicpm3": (MiniCPM3Config, {**LATENT, "v_head_dim": None, "scale_emb": 2, "dim_model_base": 24}),
}
SPARSE: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen2_moe": (Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 24, "head_dim": None}),
    "qwen3_moe": (Qwen3MoeConfig, {**EXPERTS, "norm_topk_prob": True}),
    "mixtral": (MixtralConfig, {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v2": (DeepseekV2Config, {**ROUTED, **LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": (DeepseekV3Config, {**ROUTED, **LATENT}),
    "moonlight": (DeepseekV3Config, {**ROUTED, **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "glm4_moe": (Glm4MoeConfig, {**ROUTED, "n_group": 1, "topk_group": 1, "use_qk_norm": True}),
    "gpt_oss": (
        GptOssConfig,
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
ZOO = DENSE | SPARSE


def tiny(family: str, **overrides: Any) -> PreTrainedModel:
    """An fp32 causal LM in eval mode; `overrides` are fields of the model's config."""
    config_type, differences = ZOO[family]
    fields = {**SHAPE, **differences, **overrides}
    config = config_type(**{name: value for name, value in fields.items() if name != "head_dim" or value is not None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def save(path: Path, family: str, **overrides: Any) -> Path:
    """Writes model and tokenizer to a folder that `from_pretrained` reads; returns the folder."""
    tiny(family, **overrides).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path
