"""Sections of the algorithm under verl's names; keys, defaults and presets are Paddock's."""

from __future__ import annotations

from typing import Any

from paddock.config.rollout_correction import PRESETS
from verl._sections import section

KLControlConfig: Any = section("KLControlConfig", "algorithm.kl_ctrl")
FilterGroupsConfig: Any = section("FilterGroupsConfig", "algorithm.filter_groups")


class RolloutCorrectionConfig(section("RolloutCorrectionConfig", "algorithm.rollout_correction")):  # type: ignore[misc]
    """Every preset is a function of its name: `RolloutCorrectionConfig.decoupled_token_is(threshold=2.0)`."""


def preset(name: str) -> Any:
    """Returns the function of a preset; it takes other thresholds than the preset's own."""

    def make(
        cls: type,
        threshold: float | str | None = None,
        threshold_lower: float | None = None,
        rs_threshold: float | str | None = None,
        is_threshold: float | None = None,
    ) -> Any:
        settings: dict[str, Any] = {"rollout_is": None, "rollout_rs": None, **PRESETS[name]}
        high = threshold if threshold is not None else is_threshold
        if threshold_lower is not None and high is not None:
            high = f"{threshold_lower}_{high}"
        changed = {"rollout_is_threshold": high, "rollout_rs_threshold": rs_threshold}
        return cls(**settings | {key: value for key, value in changed.items() if value is not None})

    return classmethod(make)


for known in PRESETS:
    setattr(RolloutCorrectionConfig, known, preset(known))

AlgoConfig: Any = section(
    "AlgoConfig",
    "algorithm",
    adv_estimator="gae",
    kl_ctrl=KLControlConfig,
    pf_ppo={},
    filter_groups=None,
    rollout_correction=None,
)
