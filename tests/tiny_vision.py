"""Tiny vision-language models of every family with random weights, a tokenizer with their words, and small images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from byte_tokenizer import tokenizer_of_bytes
from PIL import Image
from tiny_models import SPECIAL
from transformers import (
    AutoModelForImageTextToText,
    Glm4vConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from paddock.core.batch import Batch
from paddock.core.images import Images
from paddock.models.image_reader import ImageReader, load_processor

WORDS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
)
START, END, IMAGE, VIDEO = range(260, 264)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PATCH = 4
TEXT: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TOWER: dict[str, Any] = {"depth": 2, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2,
                         "in_channels": 3, "initializer_range": 0.2, "num_heads": 2}  # fmt: skip

FAMILIES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        Qwen2VLConfig,
        {"rope_parameters": ROPE},
        {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        {"rope_parameters": ROPE},
        {"hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 64, "fullatt_block_indexes": [1],
         "window_size": 16},
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        {"rope_parameters": ROPE | {"mrope_interleaved": True}, "head_dim": 16},
        {"hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 64, "num_position_embeddings": 64,
         "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_vl_moe": (
        Qwen3VLMoeConfig,
        {"rope_parameters": ROPE | {"mrope_interleaved": True}, "head_dim": 16, "num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
        {"hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 64, "num_position_embeddings": 64,
         "deepstack_visual_indexes": [0, 1]},
    ),
    "glm4v": (
        Glm4vConfig,
        {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}},
        {"hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 64, "image_size": 32},
    ),
}  # fmt: skip
PROCESSORS = {family: "Glm4vImageProcessor" if family == "glm4v" else "Qwen2VLImageProcessor" for family in FAMILIES}


def tiny_vision_config(family: str = "qwen2_5_vl", tie: bool = False, **changes: Any) -> Any:
    """`changes` are fields of the language model's config."""
    config_type, text, tower = FAMILIES[family]
    words = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    if family == "glm4v":
        words |= {"image_start_token_id": START, "image_end_token_id": END, "video_start_token_id": 264,
                  "video_end_token_id": 265}  # fmt: skip
    else:
        words |= {"vision_start_token_id": START, "vision_end_token_id": END}
    return config_type(text_config=TEXT | text | changes | {"tie_word_embeddings": tie}, vision_config=TOWER | tower,
                       tie_word_embeddings=tie, **words)  # fmt: skip


def tiny_vision_model(family: str = "qwen2_5_vl", attn: str = "paddock", **options: Any) -> PreTrainedModel:
    """In float32 and eval mode."""
    import paddock.models.attention  # noqa: F401  registers `paddock`

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = tiny_vision_config(family, **options)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation=attn)
        for parameter in model.parameters():  # some towers start with zeros
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.15)
    return model.eval()


def vision_tokenizer() -> PreTrainedTokenizerFast:
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIAL, strict=True))
    return tokenizer_of_bytes(before=SPECIAL, after=WORDS, template=TEMPLATE, padding_side="left", **names)


def save_tiny_vision(path: Path, family: str = "qwen2_5_vl", **options: Any) -> Path:
    """A folder as they are published: weights, tokenizer, and how images are read."""
    tiny_vision_model(family, attn="sdpa", **options).save_pretrained(path)
    vision_tokenizer().save_pretrained(path)
    settings = {"image_processor_type": PROCESSORS[family], "patch_size": PATCH, "merge_size": 2,
                "temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    return path


def reader_of(folder: Path, **limits: int) -> ImageReader:
    from transformers import AutoConfig

    return ImageReader(load_processor(folder, limits), AutoConfig.from_pretrained(folder), folder)


def painted(colour: tuple[int, int, int] = (255, 0, 0), width: int = 16, height: int = 16) -> Image.Image:
    """One colour, with a corner of another, so that up and down and left and right differ."""
    picture = Image.new("RGB", (width, height), colour)
    picture.paste((0, 60, 120), (0, 0, width // 2, height // 4))
    return picture


def encoded(picture: Image.Image) -> bytes:
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def prompt_of(reader: ImageReader, pictures: Sequence[Image.Image], text: str = "What is it?") -> tuple[list[int], Any]:
    """Tokens and images of a prompt that shows these pictures."""
    tokenizer = vision_tokenizer()
    content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": text}]
    written = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False,
                                            add_generation_prompt=True)  # fmt: skip
    tokens = tokenizer(written, add_special_tokens=False)["input_ids"]
    return reader.read(tokens, pictures) if pictures else (tokens, None)


def vision_batch(prompts: Sequence[tuple[list[int], Images | None]], samples: int = 2, width: int = 6) -> Batch:
    """Random answers of different lengths, `samples` to each prompt."""
    draw = torch.Generator().manual_seed(0)
    rows = [prompt for prompt in prompts for _ in range(samples)]
    longest = max(len(tokens) for tokens, _ in rows)
    lengths = torch.randint(1, width + 1, (len(rows),), generator=draw)
    lengths[0] = width
    inside = torch.arange(width) < lengths[:, None]
    return Batch(
        row=torch.arange(len(rows)),
        group=torch.arange(len(rows)) // samples,
        prompts=torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens, _ in rows]),
        prompt_mask=torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens, _ in rows]),
        responses=torch.randint(4, 260, (len(rows), width), generator=draw) * inside,
        mask=inside.float(),
        lengths=lengths,
        extras={"images": [images for _, images in rows]},
    )
