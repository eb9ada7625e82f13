"""What plug-ins import from verl beside formulas: metrics, configs, registries, batches, errors, rules."""

from __future__ import annotations

import pickle
import sys
from dataclasses import FrozenInstanceError
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from paddock.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[2] / "compat"))
protocol, metric = import_module("verl.protocol"), import_module("verl.utils.metric")
algos, correction = import_module("verl.trainer.ppo.core_algos"), import_module("verl.trainer.ppo.rollout_corr_helper")
configs, algorithm = import_module("verl.workers.config"), import_module("verl.trainer.config")
functional, groups = import_module("verl.utils.torch_functional"), import_module("verl.utils.groupwise")
DataProto, Metric = protocol.DataProto, metric.Metric


def batch(**meta):
    tensors = {"x": torch.tensor([[1, 2], [3, 4], [5, 6]])}
    return DataProto.from_dict(tensors, {"uid": ["a", "b", "c"], "turns": [[1], [2, 3], []]}, meta)


@pytest.mark.parametrize(("kind", "value"), [("mean", 2.5), ("sum", 10.0), ("min", 1.0), ("max", 4.0)])
def test_a_metric_reduces_its_numbers_in_one_way(kind, value):
    collected = Metric(kind, [1, 2.0])
    collected.extend([torch.tensor(3.0), np.float64(4)])
    assert collected.aggregate() == value
    assert metric.reduce_metrics({"m": collected, "loss": [1.0, 3.0], "peak/max": [1, 5]}) == {
        "m": value, "loss": 2.0, "peak/max": 5,
    }  # fmt: skip
    with pytest.raises(ValueError):
        collected.append(torch.ones(2))
    with pytest.raises(ValueError):
        collected.extend(Metric("sum" if kind != "sum" else "mean"))


def test_metrics_of_ranks_are_averaged_for_sums_and_joined_for_extremes():
    assert Metric.aggregate_dp([Metric("sum", [1.0, 2.0]), Metric("sum", [3.0, 4.0])]) == 5.0
    assert Metric.aggregate_dp([Metric("max", [1.0, 2.0]), Metric("max", [3.0, 4.0])]) == 4.0
    with pytest.raises(ValueError):
        Metric.aggregate_dp([Metric("sum", [1.0]), Metric("sum", [1.0, 2.0])])


def test_a_registry_that_was_bound_anew_is_the_one_in_use(monkeypatch):
    mine = {"gae": lambda x: 2 * x}
    monkeypatch.setattr(algos, "ADV_ESTIMATOR_REGISTRY", mine)
    assert algos.get_adv_estimator_fn("gae")(5) == 10

    @algos.register_adv_est("bound_anew")
    def estimator(token_level_rewards, response_mask, **_):
        return token_level_rewards, token_level_rewards

    assert mine["bound_anew"] is estimator is algos.get_adv_estimator_fn("bound_anew")


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: algos.get_adv_estimator_fn("no_such"), ValueError),
        (lambda: algos.get_policy_loss_fn("no_such"), ValueError),
        (lambda: algos.kl_penalty(torch.zeros(1), torch.zeros(1), "k9"), NotImplementedError),
        (lambda: algos.agg_loss(torch.ones(1, 2), torch.ones(1, 2), "no-mode"), ValueError),
        (lambda: algos.compute_policy_loss_dro(*[torch.ones(1, 2)] * 4, "token-mean"), ValueError),
        (lambda: correct(rollout_is="no_level"), ValueError),
        (lambda: correct(rollout_is="token", rollout_is_threshold=True), TypeError),
        (lambda: import_module("verl.workers.reward_manager.registry").get_reward_manager_cls("no_such"), ValueError),
    ],
)
def test_errors_are_of_the_types_that_callers_catch_and_errors_of_users(call, kind):
    with pytest.raises(kind) as error:
        call()
    assert isinstance(error.value, UserError)


def correct(**options):
    zeros = torch.zeros(2, 3)
    return correction.compute_rollout_correction_and_rejection_mask(zeros, zeros, torch.ones(2, 3), **options)


def test_off_policy_metrics_without_the_rollouts_log_probs_are_the_trained_policys():
    old, mask = torch.log(torch.tensor([[0.5, 0.25]])), torch.ones(1, 2)
    alone = correction.compute_offpolicy_metrics(old, None, mask)
    assert set(alone) == {"training_ppl", "training_log_ppl"}
    assert alone["training_ppl"] == pytest.approx(8**0.5)
    assert correction.compute_offpolicy_metrics(old, old, mask)["kl"] == pytest.approx(0)
    with pytest.raises(ValueError):
        correction.compute_offpolicy_metrics(old, old, mask * 0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_of_importance_weights_are_those_of_the_correction(level):
    generator = torch.Generator().manual_seed(0)
    log_ratio, mask = torch.randn(4, 6, generator=generator), torch.ones(4, 6)
    mask[0, 3:] = 0
    weights, expected = correction.compute_rollout_correction_weights(log_ratio, mask, level, 1.5)
    rows = (log_ratio * mask).sum(-1, keepdim=True)
    raw = torch.exp(rows.expand_as(log_ratio) if level == "sequence" else log_ratio) * mask
    found = correction.compute_is_metrics(weights, raw, rows if level == "sequence" else log_ratio, mask, level, 1.5)
    assert found == pytest.approx({name: expected[name] for name in found})
    assert set(found) == set(expected)


def test_sections_are_mappings_with_our_keys_and_change_only_where_verls_do():
    actor = configs.ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size=2, clip_ratio=0.3)
    assert actor["clip_ratio"] == actor.get("clip_ratio") == 0.3 and actor.get("nothing", 1) == 1
    assert "strategy" in actor and dict(actor)["rollout_n"] == 4 and actor.policy_loss.loss_mode == "vanilla"
    actor.ppo_mini_batch_size = 512
    with pytest.raises(FrozenInstanceError):
        actor.strategy = "megatron"
    with pytest.raises(TypeError):
        configs.ActorConfig(no_such_key=1)
    assert isinstance(configs.FSDPActorConfig(), configs.ActorConfig)
    loss, _ = algos.compute_policy_loss_vanilla(*[torch.ones(1, 2)] * 4, "token-mean", actor)
    assert loss == pytest.approx(-1)


def test_a_mapping_with_a_target_becomes_an_object_of_its_class():
    made = import_module("verl.utils.config").omega_conf_to_dataclass(
        {"_target_": "verl.trainer.config.AlgoConfig", "gamma": 0.9,
         "kl_ctrl": {"_target_": "verl.trainer.config.KLControlConfig", "kl_coef": 0.5}}
    )  # fmt: skip
    assert isinstance(made, algorithm.AlgoConfig) and isinstance(made.kl_ctrl, algorithm.KLControlConfig)
    assert (made.gamma, made.lam, made.kl_ctrl.kl_coef) == (0.9, 1.0, 0.5)
    preset = algorithm.RolloutCorrectionConfig.decoupled_geo_rs_seq_tis(rs_threshold="0.9_1.1")
    assert (preset.rollout_is, preset.rollout_rs, preset.rollout_rs_threshold) == ("sequence", "seq_mean_k1", "0.9_1.1")


def test_a_batch_survives_pickles_folds_padding_and_iterators(tmp_path):
    data = batch(step=1)
    data.save_to_disk(str(tmp_path / "batch.pkl"))
    for other in (pickle.loads(pickle.dumps(data)), DataProto.load_from_disk(str(tmp_path / "batch.pkl"))):
        assert torch.equal(other.batch["x"], data.batch["x"]) and other.meta_info == {"step": 1}
        assert other.non_tensor_batch["turns"].tolist() == [[1], [2, 3], []]
    padded, added = protocol.pad_dataproto_to_divisor(data, 4)
    assert (len(padded), added) == (4, 1) and padded.batch["x"][3].tolist() == [1, 2]
    assert torch.equal(protocol.unpad_dataproto(padded, added).batch["x"], data.batch["x"])
    folded = protocol.fold_batch_dim(data.repeat(2), 3)
    assert folded.batch["x"].shape == (3, 2, 2)
    assert torch.equal(protocol.unfold_batch_dim(folded).batch["x"], data.repeat(2).batch["x"])
    seen = [row for part in data.make_iterator(1, 1, seed=3) for row in part.non_tensor_batch["uid"]]
    assert sorted(seen) == ["a", "b", "c"]
    assert data.sample_level_repeat([2, 0, 1]).non_tensor_batch["uid"].tolist() == ["a", "a", "c"]


def test_settings_of_joined_batches_must_agree_and_metrics_become_lists():
    joined = DataProto.concat([batch(metrics={"loss": 1.0}, flag=True), batch(metrics=[{"loss": 2.0}], flag=True)])
    assert joined.meta_info == {"metrics": {"loss": [1.0, 2.0]}, "flag": True} and len(joined) == 6
    with pytest.raises(AssertionError):
        DataProto.concat([batch(flag=True), batch(flag=False)])
    with pytest.raises(AssertionError):
        batch().chunk(2)


def test_a_batch_becomes_a_tensordict_and_back_if_that_package_is_installed():
    data = batch(step=1)
    if import_module("importlib.util").find_spec("tensordict") is None:
        with pytest.raises(UserError, match="pip install tensordict"):
            data.to_tensordict()
        return
    back = DataProto.from_tensordict(data.to_tensordict())
    assert torch.equal(back.batch["x"], data.batch["x"]) and back.meta_info == {"step": 1}
    assert [list(turns) for turns in back.non_tensor_batch["turns"]] == [[1], [2, 3], []]


def test_groups_have_the_mean_and_deviation_of_the_estimators():
    index = groups.as_torch_index(["p", "q", "p", "p"])
    mean, deviation, size = groups.group_mean_std(torch.tensor([1.0, 7.0, 2.0, 6.0]), index)
    assert mean.tolist() == [3.0, 0.0] and size.tolist() == [3.0, 1.0]
    assert deviation.tolist() == pytest.approx([7**0.5, 1.0])


def test_masked_means_log_probs_and_masks_are_what_plug_ins_expect():
    values, mask = torch.tensor([[1.0, 2.0, 50.0], [4.0, 60.0, 70.0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert functional.masked_mean(values, mask) == pytest.approx(7 / 3)
    assert functional.masked_mean(values, mask, axis=-1).tolist() == pytest.approx([1.5, 4.0])
    assert functional.masked_var(values, mask) == pytest.approx(7 / 3)
    whitened = functional.masked_whiten(values, mask)
    assert functional.masked_mean(whitened, mask) == pytest.approx(0, abs=1e-6)
    logits, labels = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(functional.logprobs_from_logits(logits, labels), expected)
    assert functional.get_response_mask(torch.tensor([[5, 2, 7], [5, 6, 7]]), 2).tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("module", "arguments", "score"),
    [
        ("math_reward", (r"so \boxed{\frac12}", "0.5"), 1.0),
        ("math_verify", (r"so \boxed{3}", "4"), 0.0),
        ("geo3k", (r"<think>a</think> \boxed{3}", "3"), 1.0),
        ("search_r1_like_qa_em", ("<answer>The Nile</answer>", {"target": ["nile"]}), 1.0),
        ("gsm8k", ("#### 72", "72"), 1.0),
    ],
)
def test_rules_are_called_in_verls_signatures(module, arguments, score):
    assert import_module(f"verl.utils.reward_score.{module}").compute_score(*arguments) == score
