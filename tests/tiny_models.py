"""Tiny models of every family with random weights from a fixed seed, a byte tokenizer, and batches of random tokens."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from byte_tokenizer import tokenizer_of_bytes
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from paddock.core.batch import Batch
from paddock.data.dataset import PromptRow
from paddock.engines.rollout.base import Completion, Prompt
from paddock.rollouts.episode import Episode, continued

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
PAD, EOS, BOS = 0, 1, 2
WINDOW = 5  # tokens that sliding layers see: short, so that tests reach beyond it

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

SHAPE: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large: random weights must tell tokens and positions apart
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
}
ALTERNATING = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False}),
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "mistral": (MistralConfig, {"tie_word_embeddings": False, "sliding_window": WINDOW}),
    "gemma2": (
        Gemma2Config,
        {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {"sliding_window": WINDOW, "layer_types": ALTERNATING, "query_pre_attn_scalar": 24},
    ),
}


def tiny_model(family: str = "qwen2", **overrides: Any) -> PreTrainedModel:
    """An fp32 causal LM in eval mode; `overrides` are fields of the model's config."""
    config_type, differences = FAMILIES[family]
    config = config_type(**{**SHAPE, **differences, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def with_large_numbers(model: PreTrainedModel) -> PreTrainedModel:
    """As real ones have them: a layer adds large numbers to the stream and the next takes them away again. In bf16,
    what else was in the stream is lost beside them."""
    for layer, number in zip(model.model.layers, (256.0, -256.0), strict=False):
        attention = layer.self_attn
        attention.v_proj.weight.zero_()
        attention.v_proj.bias.fill_(1.0)
        attention.o_proj.weight.fill_(number / attention.o_proj.in_features)
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """260 tokens: the special ones first, where `SHAPE` has them, and a plain chat template."""
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIAL, strict=True))
    return tokenizer_of_bytes(before=SPECIAL, template=CHAT_TEMPLATE, padding_side="left", **names)


def save_tiny(path: Path, family: str = "qwen2", **overrides: Any) -> Path:
    """Writes model and tokenizer to a folder that `from_pretrained` reads; returns the folder."""
    tiny_model(family, **overrides).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def tiny_batch(rows: int = 6, prompt_len: int = 7, response_len: int = 9, seed: int = 0, tools: bool = False) -> Batch:
    """Random tokens in rows of different lengths; with `tools`, the policy did not write all of each response."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    prompt_lengths, lengths = draw(1, prompt_len + 1, rows, 1), draw(1, response_len + 1, rows, 1)
    prompt_lengths[0], lengths[0] = prompt_len, response_len
    column = torch.arange(response_len)
    mask = column < lengths
    if tools:
        mask &= ~((column >= lengths // 3) & (column < lengths // 2))
    prompt_mask = torch.arange(prompt_len) >= prompt_len - prompt_lengths
    return Batch(
        row=torch.arange(rows),
        group=torch.arange(rows) // 2,
        prompts=draw(4, 260, rows, prompt_len) * prompt_mask,
        prompt_mask=prompt_mask.long(),
        responses=draw(4, 260, rows, response_len) * (column < lengths),
        mask=mask.float(),
        lengths=lengths.squeeze(-1),
    )


def moved_copy(model: Path, folder: Path, seed: int) -> Path:
    """Copies a saved model of tied embeddings, and moves these: it has the same tokenizer and answers otherwise."""
    shutil.copytree(model, folder)
    weights, name = load_file(folder / "model.safetensors"), "model.embed_tokens.weight"
    noise = torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(seed))
    weights[name] = weights[name] + 0.1 * noise
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def one_turn_each(
    completions: Sequence[Completion], prompts: Sequence[Prompt], groups: Sequence[int], version: int
) -> list[Episode]:
    """Returns completions, in the order of the prompts and of their rows, as episodes that answer rows without more."""
    rows = [PromptRow(group, group, prompt.tokens, "", "", None, {}, f"row {group}", images=prompt.images)
            for group, prompt in zip(groups, prompts, strict=True)]  # fmt: skip
    asked = [own for own in zip(rows, prompts, strict=True) for _ in own[1].rows]
    return [
        continued(Episode(one.row, *own, [], done=False), one, version)
        for one, own in zip(completions, asked, strict=True)
    ]
