"""What `algorithm.rollout_correction` asks for: the presets, and the thresholds read into numbers. No torch.

The policy that samples (pi_rollout) and the one that trains (pi_train) differ in kernels, precision and age. The plan
says how their ratio is used: importance weights, rejection of tokens or rows, both, or neither, then for metrics only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paddock.config.schema import RolloutCorrectionConfig
from paddock.errors import UserError

KEY = "algorithm.rollout_correction"
WEIGHTS, REJECTIONS = "rollout_is_threshold", "rollout_rs_threshold"

WeightLevel = Literal["token", "sequence"]
BypassLoss = Literal["ppo_clip", "reinforce"]

REJECTION_OPTIONS = (
    *(f"{level}_k{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in (1, 2, 3)),
    *("seq_max_k2", "seq_max_k3"),
)

_TOKEN_IS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
_SEQUENCE_IS = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
_TOKEN_ICEPOP = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_SUM_RS = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
_GEO_RS = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3_RS = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_BYPASS_CLIP = {"bypass_mode": True, "loss_type": "ppo_clip"}
_BYPASS_PG = {"bypass_mode": True, "loss_type": "reinforce"}

PRESETS: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN_IS,
    "decoupled_seq_is": _SEQUENCE_IS,
    "decoupled_token_icepop": _TOKEN_ICEPOP,
    "decoupled_seq_is_rs": _SEQUENCE_IS | _SUM_RS,
    "decoupled_geo_rs": _GEO_RS,
    "decoupled_geo_rs_seq_tis": _SEQUENCE_IS | _GEO_RS,
    "decoupled_geo_rs_token_tis": _TOKEN_IS | _GEO_RS,
    "decoupled_k3_rs": _K3_RS,
    "decoupled_k3_rs_seq_tis": _SEQUENCE_IS | _K3_RS,
    "decoupled_k3_rs_token_tis": _TOKEN_IS | _K3_RS,
    "bypass_ppo_clip": _BYPASS_CLIP,
    "bypass_ppo_clip_geo_rs": _BYPASS_CLIP | _GEO_RS,
    "bypass_ppo_clip_k3_rs": _BYPASS_CLIP | _K3_RS,
    "bypass_pg_is": _BYPASS_PG | _SEQUENCE_IS,
    "bypass_pg_token_icepop": _BYPASS_PG | _TOKEN_ICEPOP,
    "bypass_pg_geo_rs": _BYPASS_PG | _GEO_RS,
    "bypass_pg_geo_rs_seq_tis": _BYPASS_PG | _SEQUENCE_IS | _GEO_RS,
    "bypass_pg_geo_rs_token_tis": _BYPASS_PG | _TOKEN_IS | _GEO_RS,
}


@dataclass(frozen=True)
class Rejection:
    """One test that a token, or a whole row, must pass: low <= statistic <= high, bounds in the statistic's own unit.

    k1 bounds are the logarithms of a band for pi_rollout / pi_train; k2 and k3 have no lower bound.
    """

    level: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    kind: Literal["k1", "k2", "k3"]
    low: float | None
    high: float

    @property
    def option(self) -> str:
        return f"{self.level}_{self.kind}"


@dataclass(frozen=True)
class CorrectionPlan:
    """The keys of `algorithm.rollout_correction`, checked and parsed."""

    weights: WeightLevel | None = None
    low: float | None = None
    """Lower bound of the weight band (IcePop); None truncates from above only (TIS)."""
    high: float = 2.0
    batch_normalize: bool = False
    rejections: tuple[Rejection, ...] = ()
    bypass: bool = False
    loss: BypassLoss = "ppo_clip"

    @property
    def active(self) -> bool:
        """True if the plan changes the training, and not only the metrics."""
        return self.weights is not None or bool(self.rejections) or self.bypass


def preset_settings(chosen: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Returns the preset that `chosen` names and the keys that it sets, which those that the user writes win over."""
    name = chosen.get(f"{KEY}.preset")
    if not name:
        return None
    if name not in PRESETS:
        raise wrong("preset", "is no known preset", name, f"use one of {', '.join(sorted(PRESETS))}")
    return name, {f"{KEY}.{key}": value for key, value in PRESETS[name].items()}


def parse(config: Any) -> CorrectionPlan:
    """Read the keys into a plan; a UserError names the key that cannot be read. A preset has been filled in before."""
    keys = {name: getattr(config, name, default) for name, default in vars(RolloutCorrectionConfig()).items()}
    level = _choice(keys, "rollout_is", (None, "token", "sequence"))
    low, high = _weight_bounds(keys["rollout_is_threshold"]) if level is not None else (None, 2.0)
    return CorrectionPlan(
        weights=level,
        low=low,
        high=high,
        batch_normalize=bool(keys["rollout_is_batch_normalize"]),
        rejections=_rejections(keys["rollout_rs"], keys["rollout_rs_threshold"]),
        bypass=bool(keys["bypass_mode"]),
        loss=_choice(keys, "loss_type", ("ppo_clip", "reinforce")),
    )


def wrong(name: str, reason: str, value: Any, fix: str) -> UserError:
    """Returns the refusal of a key of the section."""
    return UserError(reason, key=f"{KEY}.{name}", value=value, fix=fix)


def _choice(keys: dict[str, Any], name: str, choices: tuple[str | None, ...]) -> Any:
    value = keys[name]
    if value not in choices:
        names = ", ".join("null" if choice is None else choice for choice in choices)
        raise wrong(name, "is not one of the choices", value, f"use one of {names}")
    return value


def _weight_bounds(spec: Any) -> tuple[float | None, float]:
    """A number u truncates weights at u; "lo_hi" zeroes those outside the band."""
    if isinstance(spec, bool) or not isinstance(spec, int | float | str):
        raise wrong(WEIGHTS, "must be a number or a band", spec, "use a number such as 2.0, or '0.5_5.0'")
    return _bounds(str(spec), WEIGHTS)


def _rejections(options: Any, thresholds: Any) -> tuple[Rejection, ...]:
    if options is None:
        return ()
    names = list(dict.fromkeys(_items(options)))
    for name in names:
        if name not in REJECTION_OPTIONS:
            fix = f"use a comma list of {', '.join(REJECTION_OPTIONS)}, or null"
            raise wrong("rollout_rs", f"has no option {name!r}", options, fix)
    if not names:
        raise wrong("rollout_rs", "names no option", repr(options), "use null to reject nothing")
    specs = _threshold_items(names, thresholds)
    return tuple(_rejection(name, spec) for name, spec in zip(names, specs, strict=True))


def _threshold_items(names: list[str], thresholds: Any) -> list[str]:
    if thresholds is None or isinstance(thresholds, bool) or not isinstance(thresholds, int | float | str):
        reason = f"rollout_rs={','.join(names)} needs a threshold"
        raise wrong(REJECTIONS, reason, thresholds, "set one per option, or one for all")
    specs = _items(str(thresholds))
    if len(specs) not in (1, len(names)):
        reason = f"gives {len(specs)} thresholds for {len(names)} options ({', '.join(names)})"
        raise wrong(REJECTIONS, reason, thresholds, "give one per option in the same order, or one for all")
    return specs * len(names) if len(specs) == 1 else specs


def _rejection(option: str, spec: str) -> Rejection:
    level, _, kind = option.rpartition("_")
    low, high = _bounds(spec, REJECTIONS)
    if kind == "k1":
        low = 1 / high if low is None else low
        if low > high:
            reason = f"the band of {option} is empty: a single u means 1/u to u"
            raise wrong(REJECTIONS, reason, spec, "use a number of at least 1, or 'lo_hi' with lo <= hi")
        return Rejection(level, kind, math.log(low), math.log(high))  # type: ignore[arg-type]
    if low is not None:
        raise wrong(REJECTIONS, f"{option} has no lower bound", spec, "give one number; bands are for k1")
    return Rejection(level, kind, None, high)  # type: ignore[arg-type]


def _bounds(spec: str, name: str) -> tuple[float | None, float]:
    """Read "hi" or "lo_hi"; every bound is positive and lo <= hi."""
    parts = spec.strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise wrong(name, "is neither a number nor a band 'lo_hi'", spec, "use for example 2.0 or '0.5_2.0'")
    if not all(number > 0 for number in numbers):
        raise wrong(name, "bounds of a probability ratio must be positive", spec, "use numbers above 0")
    if numbers[0] > numbers[-1]:
        raise wrong(name, "the lower bound is above the upper", spec, f"use '{numbers[1]:g}_{numbers[0]:g}'")
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


def _items(text: Any) -> list[str]:
    return [item.strip() for item in str(text).split(",") if item.strip()]
