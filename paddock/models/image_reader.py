"""From pictures to what a model sees of them: pixels, the tokens that stand for them, and where those are.

The image processor is transformers' PIL version, also where torchvision is installed: numbers are the same everywhere.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from paddock.config.roles import ActorRolloutRefConfig
from paddock.config.rollout_engines import ENGINES
from paddock.config.schema import DataConfig
from paddock.core.images import Images
from paddock.errors import UserError
from paddock.facts.distribution import install_command
from paddock.models.load import MODEL_KEY, load_config, model_folder
from paddock.models.vision import has_tower

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
FILES = (PREPROCESSOR, PROCESSOR, "video_preprocessor_config.json", "chat_template.json", "chat_template.jinja")
"""What a model's folder says about its processor."""
KWARGS_KEY = "data.mm_processor_kwargs"
PIXELS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Limits of an image's area, and what a processor calls them."""


class ImageReader:
    """The image processor of one model."""

    def __init__(self, processor: Any, config: PreTrainedConfig, folder: Path):
        self.processor, self.config, self.folder = processor, config, folder
        self.token: int = config.image_token_id
        """The token that stands for an image in a prompt, once for each of its features."""

    @classmethod
    def of(cls, group: ActorRolloutRefConfig, data: DataConfig) -> Self | None:
        """Returns the image reader of the run's model; None if it reads no images."""
        path, model = str(group.model.path), group.model
        read = load_config(path, model.trust_remote_code, model.override_config)
        if not has_tower(read) or not hasattr(backbone_class(read), "get_rope_index"):
            return None
        engine = group.rollout.name
        seeing = [name for name, kind in ENGINES.items() if kind.sees_images]
        if engine not in seeing:
            raise UserError(
                f"images are not handed to {engine}, and it could draw tokens that only a processor writes",
                key="actor_rollout_ref.rollout.name",
                value=engine,
                fix=f"{' or '.join(seeing)}, for a model with a vision tower",
            )
        folder = model_folder(path)
        reader = cls(load_processor(folder, data.mm_processor_kwargs), read, folder)
        wanted, patch = data.image_patch_size, read.vision_config.patch_size
        if wanted not in (None, patch):
            raise UserError(
                f"patches of this model have {patch} pixels a side",
                key="data.image_patch_size",
                value=wanted,
                fix=f"{patch}, or leave it out",
            )
        return reader

    def features(self, height: int, width: int) -> int:
        """Tokens that an image of this size takes."""
        return int(self.processor.get_number_of_image_patches(height, width, {})) // self.processor.merge_size**2

    def read(self, tokens: list[int], pictures: Sequence[Any]) -> tuple[list[int], Images]:
        """Returns the prompt with one image token per feature where it had one per image, and the images."""
        found = self.processor(images=list(pictures), return_tensors="pt")
        pixels, grids = found["pixel_values"], found["image_grid_thw"]
        counts = iter((grids.prod(-1) // self.processor.merge_size**2).tolist())
        expanded = [each for token in tokens for each in ([token] * next(counts) if token == self.token else [token])]
        ids = torch.tensor(expanded)
        seen = ids == self.token
        positions, offset = rope_index(self.config, ids, seen, grids)
        return expanded, Images(pixels, grids, seen.nonzero()[:, 0], positions, offset)

    def identity(self) -> bytes:
        """Returns a hash; readers with equal ones give an image of equal size as many tokens."""
        parts = [self.processor.to_dict(), self.token]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).digest()

    def save(self, folder: Path) -> None:
        copy_processor(self.folder, folder)


def copy_processor(source: Path, target: Path) -> None:
    """Copies the files about a model's processor, as its authors wrote them; those that are there already stay."""
    for name in FILES:
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)


def backbone_class(config: PreTrainedConfig) -> Any:
    return MODEL_MAPPING.get(type(config), None)


def load_processor(folder: Path, kwargs: Mapping[str, Any]) -> Any:
    """Loads the image processor with the user's changes: min_pixels, max_pixels."""
    if find_spec("PIL") is None:
        raise UserError("images need Pillow", key=MODEL_KEY, value=folder, fix=install_command("vision"))
    file = next((folder / name for name in (PREPROCESSOR, PROCESSOR) if (folder / name).is_file()), None)
    if file is None:
        reason = f"the folder has no {PREPROCESSOR}, which says how images are read"
        raise UserError(reason, key=MODEL_KEY, value=folder, fix="copy it from where the model comes from")
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings = settings.get("image_processor", settings)
    name = str(settings.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil") + "Pil"
    made = getattr(transformers, name, None)
    if made is None or not hasattr(made, "get_number_of_image_patches"):
        raise UserError(
            f"{file.name} names an image processor that is not known: {settings.get('image_processor_type')}",
            key=MODEL_KEY,
            value=folder,
            fix="use a model of the families qwen2_vl, qwen2_5_vl, qwen3_vl or glm4v",
        )
    if unknown := sorted(set(kwargs) - {*PIXELS}):
        raise UserError("limits are all that can be set", key=f"{KWARGS_KEY}.{unknown[0]}", fix=" or ".join(PIXELS))
    size = dict(settings.get("size") or made.size)
    for name, edge in PIXELS.items():
        older = size.pop(name, None)  # files of some years ago have them there
        if (pixels := kwargs.get(name, settings.get(name, older))) is not None:
            size[edge] = pixels
    rest = {name: value for name, value in settings.items() if name not in PIXELS}
    return made.from_dict(rest | {"size": size})


def rope_index(config: PreTrainedConfig, ids: Tensor, seen: Tensor, grids: Tensor) -> tuple[Tensor, int]:
    """Positions ``[3, P]``, and what comes behind: by the model's own rule, which asks for its config alone."""
    kind = backbone_class(config)
    rule = kind.__new__(kind)
    vars(rule)["config"] = config
    positions, offset = rule.get_rope_index(ids[None], mm_token_type_ids=seen.int()[None], image_grid_thw=grids)
    return positions[:, 0], int(offset)
