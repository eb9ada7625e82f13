"""Reward models: a causal LM's backbone and a linear head that gives one number for a conversation, or one a token.

`load_reward_model` reads what `transformers` calls a sequence classifier or a token classifier with one label, and the
critics that `paddock train` saves; `save_classifier` writes the first of these.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from paddock.core.batch import Batch, PerRow, PerToken
from paddock.errors import UserError
from paddock.models.files import ModelPath
from paddock.models.load import load_backbone, load_causal_lm, load_config, model_folder
from paddock.models.value_head import HEAD_FILE, ValueModel

CLASSIFIERS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}
"""Loader by the end of a class's name in config.json."""
HEADS = ("score", "classifier")
"""Names under which `transformers` keeps the head."""
LAST_ONLY = "scores_last_token_only"
"""A field of config.json: in the checkpoints of `paddock rm train`, the head beside the backbone is not a critic's."""
KEY = "reward_model.model.path"


class RewardModel(ValueModel):
    """r = w.h + b, with h the hidden state of the token itself."""

    def __init__(self, backbone: PreTrainedModel, every_token: bool):
        super().__init__(backbone)
        self.every_token = every_token
        """True if the model scores every token, False if only whole conversations."""
        setattr(backbone.config, LAST_ONLY, not every_token)
        self.value_head.bias.requires_grad_(False)  # a difference of two scores does not feel it

    @property
    def unread(self) -> int | None:
        """The token that `transformers` takes for padding at a sequence's end, whatever it was meant as."""
        return None if self.every_token else self.backbone.config.get_text_config().pad_token_id

    def for_pairs(self, pad_token: int) -> RewardModel:
        """Prepares the model for training on whole sequences: of a head that it has, only the weight is kept."""
        config = self.backbone.config
        config.get_text_config().pad_token_id = pad_token
        setattr(config, LAST_ONLY, True)
        nn.init.zeros_(self.value_head.bias)
        self.every_token = False
        return self

    def take_head(self, head: nn.Module, asked: ModelPath) -> None:
        if not isinstance(head, nn.Linear) or head.out_features != 1:
            fix = "a model of AutoModelForSequenceClassification or AutoModelForTokenClassification with one label"
            raise asked.wrong(f"its head is {head}, not one linear map to one number", fix)
        with torch.no_grad():
            self.value_head.weight.copy_(head.weight)
            if head.bias is not None:
                self.value_head.bias.copy_(head.bias)


def load_reward_model(
    path: str,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    key: str = KEY,
    fresh_head: bool = False,
    **where: Any,
) -> RewardModel:
    """Loads a reward model in eval mode; `where`: device and dtype. With `fresh_head`, one without a head gets zeros to
    train; else it is refused."""
    folder, asked = model_folder(path, key), ModelPath(path, key)
    source = {"trust_remote_code": trust_remote_code, "override_config": override_config, "key": key, **where}
    if (folder / HEAD_FILE).is_file():
        backbone = load_backbone(path, **source)
        model = RewardModel(backbone, every_token=not getattr(backbone.config, LAST_ONLY, False))
        model.load_head(folder)
        return model.eval()
    config = load_config(path, trust_remote_code, override_config, key)
    kind = classifier_kind(config)
    if kind is None:
        if not fresh_head:
            raise no_head(config, asked)
        return RewardModel(load_backbone(path, **source), every_token=False).eval()
    source["override_config"] = {**(override_config or {}), "num_labels": 1}
    whole = load_causal_lm(path, **source, kind=CLASSIFIERS[kind])
    model = RewardModel(whole.base_model, every_token=kind == "ForTokenClassification")
    model.take_head(next((getattr(whole, name) for name in HEADS if hasattr(whole, name)), nn.Identity()), asked)
    return model.eval()


def classifier_kind(config: PreTrainedConfig) -> str | None:
    names = config.architectures or []
    return next((kind for kind in CLASSIFIERS for name in names if name.endswith(kind)), None)


def no_head(config: PreTrainedConfig, asked: ModelPath) -> UserError:
    return asked.wrong(
        f"it is a {', '.join(config.architectures or ['model of unknown class'])}, which gives no score",
        "a sequence or token classifier with one label; `paddock rm train` makes one from preference pairs; "
        "reward_model.judge.source=engine lets a language model judge in words",
    )


def scored_batch(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], every_token: bool) -> Batch:
    """Sequences as the engines take them: an engine's value speaks of the state before a token, so each answer is
    followed by one more place. Its value is the sequence's score; with `every_token`, those before it count too."""
    ids = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    responses = pad_sequence([torch.tensor([*answer, 0]) for answer in answers], batch_first=True)
    lengths = torch.tensor([len(answer) + 1 for answer in answers])
    place = torch.arange(responses.shape[1])
    mask = (place < lengths[:, None]) if every_token else (place == lengths[:, None] - 1)
    rows = torch.arange(len(prompts))
    return Batch(
        row=rows,
        group=rows,
        prompts=pad_sequence(ids, batch_first=True, padding_side="left"),
        prompt_mask=pad_sequence([torch.ones_like(prompt) for prompt in ids], batch_first=True, padding_side="left"),
        responses=responses,
        mask=mask.long(),
        lengths=lengths,
    )


def sequence_scores(batch: Batch, values: PerToken) -> PerRow:
    """Returns the number at the end of each sequence of a `scored_batch`."""
    return values.gather(1, batch.need("lengths").to(values.device).unsqueeze(-1) - 1).squeeze(-1)


def save_classifier(model: RewardModel, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Saves for `AutoModelForSequenceClassification` and `load_reward_model`. `weights` replace the model's own."""
    config = copy.deepcopy(model.backbone.config)
    config.num_labels = 1
    with torch.device("meta"):
        shell = AutoModelForSequenceClassification.from_config(config)
    state = {HEADS[0] + ".weight": weights["value_head.weight"].contiguous()}
    for name, tensor in weights.items():
        part, _, rest = name.partition(".")
        if part == "backbone":
            state[f"{shell.base_model_prefix}.{rest}"] = tensor.contiguous()
    shell.save_pretrained(folder, state_dict=state)
