"""Reading `algorithm.rollout_correction`: presets, thresholds, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest

from paddock.config.rollout_correction import KEY, PRESETS, CorrectionPlan, Rejection, parse, preset_settings
from paddock.errors import UserError
from paddock.loading.load import load

GEO = Rejection("seq_mean", "k1", math.log(0.999), math.log(1.001))
K3 = Rejection("seq_mean", "k3", None, 0.01)
SUM = Rejection("seq_sum", "k1", math.log(0.5), math.log(2.0))

EXPECTED = {
    "disabled": CorrectionPlan(),
    "decoupled_token_is": CorrectionPlan("token"),
    "decoupled_seq_is": CorrectionPlan("sequence"),
    "decoupled_token_icepop": CorrectionPlan("token", 0.5, 5.0),
    "decoupled_seq_is_rs": CorrectionPlan("sequence", rejections=(SUM,)),
    "decoupled_geo_rs": CorrectionPlan(rejections=(GEO,)),
    "decoupled_geo_rs_seq_tis": CorrectionPlan("sequence", rejections=(GEO,)),
    "decoupled_geo_rs_token_tis": CorrectionPlan("token", rejections=(GEO,)),
    "decoupled_k3_rs": CorrectionPlan(rejections=(K3,)),
    "decoupled_k3_rs_seq_tis": CorrectionPlan("sequence", rejections=(K3,)),
    "decoupled_k3_rs_token_tis": CorrectionPlan("token", rejections=(K3,)),
    "bypass_ppo_clip": CorrectionPlan(bypass=True),
    "bypass_ppo_clip_geo_rs": CorrectionPlan(bypass=True, rejections=(GEO,)),
    "bypass_ppo_clip_k3_rs": CorrectionPlan(bypass=True, rejections=(K3,)),
    "bypass_pg_is": CorrectionPlan("sequence", bypass=True, loss="reinforce"),
    "bypass_pg_token_icepop": CorrectionPlan("token", 0.5, 5.0, bypass=True, loss="reinforce"),
    "bypass_pg_geo_rs": CorrectionPlan(rejections=(GEO,), bypass=True, loss="reinforce"),
    "bypass_pg_geo_rs_seq_tis": CorrectionPlan("sequence", rejections=(GEO,), bypass=True, loss="reinforce"),
    "bypass_pg_geo_rs_token_tis": CorrectionPlan("token", rejections=(GEO,), bypass=True, loss="reinforce"),
}


def plan_of(**keys):
    return parse(SimpleNamespace(**keys))


def test_every_preset_means_what_its_name_says():
    def values(name):
        found, settings = preset_settings({f"{KEY}.preset": name})
        return {key.removeprefix(f"{KEY}."): value for key, value in settings.items() if found == name}

    assert {name: plan_of(**values(name)) for name in PRESETS} == EXPECTED


def test_the_launch_default_corrects_nothing():
    plan = plan_of()
    assert plan == CorrectionPlan() and not plan.active
    assert plan_of(rollout_is="token").active and plan_of(bypass_mode=True).active


def test_a_key_that_is_written_wins_over_the_preset_also_with_its_default_value():
    preset = "algorithm.rollout_correction.preset"
    changed = load([f"{preset}=decoupled_geo_rs_seq_tis", "algorithm.rollout_correction.rollout_is=token"])
    assert parse(changed.config.algorithm.rollout_correction) == CorrectionPlan("token", rejections=(GEO,))
    kept = load([f"{preset}=bypass_pg_is", "algorithm.rollout_correction.loss_type=ppo_clip"])
    assert parse(kept.config.algorithm.rollout_correction) == CorrectionPlan("sequence", bypass=True)


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(UserError, match="decoupled_seq_is_rs"):
        load(["algorithm.rollout_correction.preset=decoupled_seq"])


@pytest.mark.parametrize(
    "threshold,low,high", [(2, None, 2.0), (2.5, None, 2.5), ("3", None, 3.0), (" 0.5_5.0 ", 0.5, 5.0), ("1_1", 1, 1)]
)
def test_a_weight_threshold_is_a_number_or_a_band(threshold, low, high):
    plan = plan_of(rollout_is="token", rollout_is_threshold=threshold)
    assert (plan.low, plan.high) == (low, high)


def test_a_single_k1_bound_means_its_inverse_too():
    (only,) = plan_of(rollout_rs="token_k1", rollout_rs_threshold=4).rejections
    assert only == Rejection("token", "k1", -math.log(4), math.log(4))


def test_one_threshold_serves_all_options_and_repeats_are_dropped():
    plan = plan_of(rollout_rs="token_k2, seq_max_k3,token_k2", rollout_rs_threshold="0.3")
    assert plan.rejections == (Rejection("token", "k2", None, 0.3), Rejection("seq_max", "k3", None, 0.3))
    plan = plan_of(rollout_rs="seq_sum_k1,seq_mean_k3", rollout_rs_threshold="0.5_2.0,0.01")
    assert plan.rejections == (SUM, K3)


@pytest.mark.parametrize(
    "keys,key",
    [
        ({"rollout_is": "geometric"}, "rollout_is"),
        ({"rollout_is": True}, "rollout_is"),
        ({"loss_type": "vanilla"}, "loss_type"),
        ({"rollout_is": "token", "rollout_is_threshold": None}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": ""}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": "nan"}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "rollout_is_threshold"),
        ({"rollout_is": "token", "rollout_is_threshold": "1_2_3"}, "rollout_is_threshold"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "rollout_rs"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "rollout_rs"),
        ({"rollout_rs": " , ", "rollout_rs_threshold": 2}, "rollout_rs"),
        ({"rollout_rs": "token_k1"}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": True}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0_2"}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": ","}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": -0.1}, "rollout_rs_threshold"),
        ({"rollout_rs": "token_k1,token_k2,token_k3", "rollout_rs_threshold": "2,1"}, "rollout_rs_threshold"),
    ],
)
def test_what_cannot_be_read_is_refused_with_key_value_reason_and_fix(keys, key):
    with pytest.raises(UserError) as caught:
        plan_of(**keys)
    assert caught.value.key == f"algorithm.rollout_correction.{key}"
    assert caught.value.reason and caught.value.fix


def test_reading_the_config_needs_no_torch():
    code = "import sys, paddock.config.rollout_correction; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
