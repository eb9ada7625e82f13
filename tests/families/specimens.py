"""One tiny model of each family in a folder, as it would be published, with prompts and rows that suit it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_batch
from tiny_zoo import DENSE, SPARSE, ZOO, save

from paddock.core.batch import Batch
from paddock.engines.rollout.base import Prompt

TITLES = {
    "llama": "Llama 2, 3; SmolLM2; DeepSeek LLM",
    "qwen2": "Qwen 2, 2.5",
    "qwen3": "Qwen 3",
    "mistral": "Mistral",
    "mistral_nemo": "Mistral Nemo",
    "ministral": "Ministral",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)",
    "glm": "GLM-4",
    "glm4": "GLM-4-0414",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "phi3": "Phi-3, Phi-4",
    "olmo2": "OLMo 2",
    "minicpm3": "MiniCPM3",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, R1",
    "moonlight": "Moonlight",
    "glm4_moe": "GLM-4.5",
    "gpt_oss": "gpt-oss",
    "qwen2_vl": "Qwen2-VL",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen3_vl": "Qwen3-VL",
    "glm4v": "GLM-4.1V",
}
VISION = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
"""Rows of the matrix whose prompts show pictures; their models are those of tests/tiny_vision.py."""
FAMILIES = (*DENSE, *SPARSE, *VISION)


@dataclass(frozen=True)
class Specimen:
    family: str
    folder: Path
    """What is read."""
    scratch: Path
    """Where features write."""

    @classmethod
    def of(cls, family: str, root: Path) -> Specimen:
        folder = root / family / "model"
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            if family in ZOO:
                save(folder, family)
            else:
                from tiny_vision import save_tiny_vision

                save_tiny_vision(folder, family)
        return cls(family, folder, folder.parent)

    @property
    def has_experts(self) -> bool:
        return self.family in SPARSE

    def pictured(self) -> list[tuple[list[int], Any]]:
        from tiny_vision import painted, prompt_of, reader_of

        reader = reader_of(self.folder)
        shown = [[painted()], [painted((0, 255, 0), 24, 16), painted((0, 0, 255))], []]
        return [prompt_of(reader, pictures) for pictures in shown]

    def prompts(self) -> list[Prompt]:
        if self.family in VISION:
            found = self.pictured()
            return [Prompt(tokens, [2 * i, 2 * i + 1], images) for i, (tokens, images) in enumerate(found)]
        drawn = torch.randint(4, 260, (4, 9), generator=torch.Generator().manual_seed(0)).tolist()
        return [Prompt(row[: 3 + 2 * i], [2 * i, 2 * i + 1]) for i, row in enumerate(drawn)]

    def batch(self) -> Batch:
        """Responses of different lengths, with what an update reads beside them."""
        if self.family in VISION:
            from tiny_vision import vision_batch

            batch = vision_batch(self.pictured())
        else:
            batch = tiny_batch(rows=4, tools=True)
        draws = torch.randn(4, *batch.need("mask").shape, generator=torch.Generator().manual_seed(1))
        old, advantages, values, returns = draws * batch.need("mask")
        return batch.with_(old_log_probs=old - 5, advantages=advantages, values=values, returns=returns)
