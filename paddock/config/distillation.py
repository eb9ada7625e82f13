"""Keys of on-policy distillation: the losses with what each needs, and the teachers that a config names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddock.config.field import key, section
from paddock.config.paths import expanded
from paddock.config.roles import KL_KINDS

TOPK = "forward_kl_topk"
LOSSES: dict[str, frozenset[str]] = dict.fromkeys(KL_KINDS, frozenset({"log_probs"})) | {
    TOPK: frozenset({"topk_tokens", "topk_log_probs"})
}
"""Maps each loss to the outputs of the teacher's forward pass that it reads."""
TEACHERS = "distillation.teacher_models"


@dataclass
class DistillationLossConfig:
    loss_mode: str = key(
        "k3",
        "divergence of student and teacher: an estimate at the drawn token (k1, k3, ...), or forward_kl_topk",
        choices=tuple(LOSSES),
    )
    topk: int = key(32, "forward_kl_topk: the teacher's likeliest tokens that it sums over", low=1)
    use_policy_gradient: bool = key(
        False, "the divergence is a penalty in a policy loss, without gradient of its own; False: it is the loss"
    )
    use_task_rewards: bool = key(True, "add the policy loss of the rewards; False: the teacher alone trains")
    distillation_loss_coef: float = key(1.0, "weight of the distillation loss beside the policy loss", low=0)
    loss_max_clamp: float | None = key(None, "clamp the divergence of a token to +- this; unset: no clamp", above=0)
    log_prob_min_clamp: float | None = key(
        None, "forward_kl_topk: lowest log-prob of a token, of student and teacher; unset: none", high=0
    )
    policy_loss_mode: str = key("vanilla", "policy loss of use_policy_gradient", choices=("vanilla",))
    clip_ratio: float = key(0.2, "its clip range", above=0)
    clip_ratio_low: float | None = key(None, "its lower clip range; unset: clip_ratio", above=0)
    clip_ratio_high: float | None = key(None, "its upper clip range; unset: clip_ratio", above=0)


@dataclass
class DistillationConfig:
    enabled: bool = key(False, "train towards frozen teachers on what the student samples")
    teacher_models: dict[str, Any] = key(
        {}, "teachers by a name of yours: NAME.model_path, and of several NAME.key, the rows' value of teacher_key"
    )
    teacher_key: str = key("data_source", "column of the rows that picks the teacher, if there are several")
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig)


@dataclass(frozen=True)
class Teacher:
    """A frozen model that a config names."""

    name: str
    path: str
    key: str | None
    """Value of `teacher_key` in the rows that it scores; None: the only teacher scores all rows."""

    @property
    def role(self) -> str:
        """Name of the role, which no other role has."""
        return f"teacher {self.name}"

    @property
    def setting(self) -> str:
        return f"{TEACHERS}.{self.name}.model_path"


def teachers_of(config: DistillationConfig) -> list[Teacher]:
    """Returns the teachers of a run in the order of the config; an entry without a model is the default of a file."""
    if not config.enabled:
        return []
    named = {
        name: entry
        for name, entry in config.teacher_models.items()
        if isinstance(entry, Mapping) and entry.get("model_path")
    }
    return [
        Teacher(
            name,
            expanded(f"{TEACHERS}.{name}.model_path", str(entry["model_path"])),
            None if len(named) == 1 or entry.get("key") is None else str(entry["key"]),
        )
        for name, entry in named.items()
    ]
