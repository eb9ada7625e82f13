"""Checkpoints that one process writes whole, and the tensors that a checkpoint holds."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from paddock.engines.train.forwards import backbone_of, stored_buffers
from paddock.engines.train.optim import Updater
from paddock.errors import UserError
from paddock.models.adapters import Adapters, is_adapter, read
from paddock.models.value_head import HEAD_FILE, ValueModel

OPTIMIZER_FILE = "optimizer.pt"


def own_tensors(model: nn.Module, updater: Updater | None, adapters: Adapters | None) -> dict[str, Tensor]:
    """Returns this process's tensors that a checkpoint holds: all weights, trained ones as masters; or those alone."""
    weights = {} if adapters else {name: param.detach() for name, param in model.named_parameters()}
    buffers = {} if adapters else stored_buffers(model)
    return weights | buffers | (updater.named_masters() if updater else {})


def save_whole(model: PreTrainedModel | ValueModel, path: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Writes the model as `transformers` loads it, a value head beside it."""
    path.mkdir(exist_ok=True)
    alone = {name: own_storage(tensor.detach()) for name, tensor in weights}
    if isinstance(model, ValueModel):
        model.save(path, alone)
    else:
        model.save_pretrained(path, state_dict=alone)


def own_storage(tensor: Tensor) -> Tensor:
    """Returns the tensor contiguous, and not as a part of a larger one: files hold no views."""
    part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone(memory_format=torch.contiguous_format) if part else tensor.contiguous()


def stored_weights(model: PreTrainedModel | ValueModel, path: Path, adapters: Adapters | None) -> dict[str, Tensor]:
    """Reads a model through transformers, which knows where a family's files differ from its modules; or an adapter."""
    if adapters:
        return stored_adapter(model, path)
    own = backbone_of(model)
    try:
        backbone, report = type(own).from_pretrained(
            path, config=copy.deepcopy(own.config), dtype=torch.float32, output_loading_info=True
        )
        strange = sorted([*report["missing_keys"], *report["unexpected_keys"]])
    except RuntimeError as error:  # shapes that differ
        strange = str(error).splitlines()[:1]
    if strange:
        raise another_model(path, strange)
    if not isinstance(model, ValueModel):
        return backbone.state_dict()
    critic = ValueModel(backbone)
    critic.load_head(path)
    return critic.state_dict()


def stored_adapter(model: nn.Module, path: Path) -> dict[str, Tensor]:
    own = {name: param for name, param in model.named_parameters() if is_adapter(name)}
    stored, strange = read(path, own)
    if strange:
        raise another_model(path, strange)
    head = load_file(path / HEAD_FILE) if isinstance(model, ValueModel) else {}
    return stored | {f"value_head.{name}": tensor for name, tensor in head.items()}


def another_model(path: Path, strange: list[str]) -> UserError:
    return UserError(
        f"the checkpoint {path} holds another model: {', '.join(strange[:3])}",
        key="trainer.resume_mode",
        fix="resume with the model it was made with, or set trainer.resume_mode=disable",
    )
