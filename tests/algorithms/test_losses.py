"""Every policy loss, its gradient and its metrics against loops over single tokens, and values worked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from paddock.algorithms.correction import correction
from paddock.algorithms.losses import POLICY_LOSS, LossInputs, evaluate, policy_loss_terms
from paddock.config.roles import POLICY_LOSSES, ActorConfig
from paddock.config.rollout_correction import parse
from paddock.core.masked import AGGREGATIONS, Denominators, aggregate
from paddock.errors import UserError

LOSSES = (
    "vanilla", "gspo", "cispo", "sapo", "gpg", "reinforce", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl",
    "dro", "bypass_mode",
)  # fmt: skip
EXP_BOUND = 20.0


def settings(loss_mode="vanilla", **keys):
    correction_keys = keys.pop("rollout_correction", {"rollout_is": "token", "loss_type": "reinforce"})
    policy_loss = {
        "loss_mode": loss_mode, "clip_cov_ratio": 0.2, "clip_cov_lb": 0.01, "clip_cov_ub": 5.0, "kl_cov_ratio": 0.25,
        "ppo_kl_coef": 0.3, "dro_beta": 0.4, "rollout_correction": SimpleNamespace(**correction_keys),
    }  # fmt: skip
    policy_loss |= {name: keys.pop(name) for name in list(keys) if name in policy_loss}
    actor = {
        "clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28, "clip_ratio_c": 1.6, "tau_pos": 1.0,
        "tau_neg": 1.05, "loss_agg_mode": "token-mean", "entropy_coeff": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.1,
        "kl_loss_type": "low_var_kl", "policy_loss": SimpleNamespace(**policy_loss),
    }  # fmt: skip
    return SimpleNamespace(**(actor | keys))


def sample(seed=0, rows=5, columns=8, spread=0.5):
    """Inputs with holes in the mask, ratios on both sides of every clip, and one row that is masked altogether."""
    random = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return torch.rand(rows, columns, generator=random, dtype=torch.float64) * (high - low) + low

    old = draw(-2.0, -0.05)
    mask = (draw(0, 1) < 0.75).long()
    mask[0] = 0
    shift = torch.tensor([0.0, 0.4, -0.4, 0.5, -0.5]).double()[torch.arange(rows) % 5, None]
    return LossInputs(
        log_probs=(old + shift + draw(-spread, spread)).clamp(max=-1e-3).requires_grad_(),
        old_log_probs=old,
        advantages=draw(-1.5, 1.5),
        mask=mask,
        weights=draw(0.1, 2.0),
        rollout_log_probs=old + draw(-0.3, 0.3),
        rows=torch.arange(rows) + 100,
    )


def without_weights(x):
    return LossInputs(x.log_probs, x.old_log_probs, x.advantages, x.mask, None, x.rollout_log_probs, rows=x.rows)


# One token at a time: (loss, clipped, clipped below); the loss without importance weight.


def ratio_of(new, old):
    return torch.exp(torch.clamp(new - old, -EXP_BOUND, EXP_BOUND))


def clip(x, config):
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return max(min(x, 1 + high), 1 - low) if not isinstance(x, torch.Tensor) else x.clamp(1 - low, 1 + high)


def slow_vanilla(new, old, adv, config):
    r = ratio_of(new, old)
    plain, clipped = -adv * r, -adv * clip(r, config)
    loss, lower = (clipped if clipped > plain else plain), False
    if adv < 0 and loss > -adv * config.clip_ratio_c:
        loss, lower = 0 * new - adv * config.clip_ratio_c, True
    return loss, bool(clipped > plain), lower


def slow_cispo(new, old, adv, config):
    r = ratio_of(new, old).item()
    return -clip(r, config) * adv * new, clip(r, config) != r, False


def slow_sapo(new, old, adv, config):
    tau = config.tau_pos if adv > 0 else config.tau_neg
    return -adv * 4 / tau / (1 + torch.exp(-tau * (ratio_of(new, old) - 1))), False, False


def slow_gradient(new, old, adv, config):
    return -adv * new, None, None


def slow_dppo(new, old, adv, config, keep):
    r = ratio_of(new, old).item()
    return -adv * min(r, config.clip_ratio_c) * new * keep, not keep, keep and r > config.clip_ratio_c


def slow_dppo_tv(new, old, adv, config):
    change = math.exp(new.item()) - math.exp(old.item())
    return slow_dppo(new, old, adv, config, change <= 0.28 if adv > 0 else change >= -0.2)


def slow_dppo_kl(new, old, adv, config):
    p, q = math.exp(old.item()), math.exp(new.item())
    k = p * (old.item() - new.item()) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    return slow_dppo(new, old, adv, config, (k <= 0.28 or q <= p) if adv > 0 else (k <= 0.2 or q >= p))


def slow_dro(new, old, adv, config):
    beta = config.policy_loss.dro_beta
    return -(adv * new - beta / 2 * (new - old) ** 2), None, None


SLOW_TOKEN = {
    "vanilla": slow_vanilla, "cispo": slow_cispo, "sapo": slow_sapo, "gpg": slow_gradient, "reinforce": slow_gradient,
    "dppo_tv": slow_dppo_tv, "dppo_kl": slow_dppo_kl, "dro": slow_dro,
}  # fmt: skip


def slow_gspo_row(new, old, adv, config):
    log_s = sum(n.item() - o.item() for n, o in zip(new, old, strict=True)) / max(len(new), 1)
    out = []
    for n, a in zip(new, adv, strict=True):
        s = torch.exp(torch.clamp(log_s + n - n.detach(), max=10))
        plain, clipped = -a * s, -a * clip(s, config)
        out.append((clipped if clipped > plain else plain, bool(clipped > plain), False))
    return out


def slow_geo_row(new, old, adv, weights, config):
    if not new:
        return []
    low, high = 0.2, 0.28
    exponent, flags = 0.0, []
    for n, o, a in zip(new, old, adv, strict=True):
        z = n - o
        sign = (a > 0) - (a < 0)
        bounded = z.clamp(-low, high)
        exponent = exponent + sign * min(sign * z, sign * bounded)
        flags.append((bool(bounded != z) and a > 0, bool(bounded != z) and a < 0))
    loss = -(sum(adv) / len(adv)) * torch.exp(exponent / len(new))
    if weights is not None:
        loss = loss * math.exp(sum(math.log(w + 1e-10) for w in weights) / len(weights))
    return [(loss, *flag) for flag in flags]


def slow_matrix(name, x, config, selected=None):
    """Rows of (position, loss with weights, clipped, lower) over the valid tokens."""
    rows = []
    for i in range(len(x.mask)):
        at = [t for t in range(x.mask.shape[1]) if x.mask[i, t]]
        new, old = [x.log_probs[i, t] for t in at], [x.old_log_probs[i, t] for t in at]
        adv = [x.advantages[i, t].item() for t in at]
        weights = None if x.weights is None else [x.weights[i, t].item() for t in at]
        if name == "geo_mean":
            found = slow_geo_row(new, old, adv, weights, config)
        else:
            found = slow_row(name, new, old, adv, config, None if selected is None else [selected[i, t] for t in at])
            if weights is not None:
                found = [(loss * w, *rest) for (loss, *rest), w in zip(found, weights, strict=True)]
        rows.append([(t, *entry) for t, entry in zip(at, found, strict=True)])
    return rows


def slow_row(name, new, old, adv, config, selected):
    if name == "gspo":
        return slow_gspo_row(new, old, adv, config)
    if name in ("clip_cov", "kl_cov"):
        out = []
        for n, o, a, chosen in zip(new, old, adv, selected, strict=True):
            r = torch.exp(n - o)
            if name == "kl_cov":
                out.append((-a * r + (0.3 * abs(n - o) if chosen else 0), None, None))
            else:
                out.append((0 * n if chosen else max(-a * r, -a * clip(r, config)), bool(chosen), None))
        return out
    return [SLOW_TOKEN[name](n, o, a, config) for n, o, a in zip(new, old, adv, strict=True)]


def slow_aggregate(rows, mode, columns):
    sums = [sum((entry[1] for entry in row), start=torch.zeros((), dtype=torch.float64)) for row in rows]
    full = [i for i, row in enumerate(rows) if row]
    tokens = sum(len(row) for row in rows)
    return {
        "token-mean": sum(sums) / tokens,
        "seq-mean-token-sum": sum(sums) / len(full),
        "seq-mean-token-mean": sum(sums[i] / len(rows[i]) for i in full) / len(full),
        "seq-mean-token-sum-norm": sum(sums) / len(full) / columns,
        "token-sum": sum(sums),
    }[mode]


def slow_loss(name, x, config, selected=None):
    """(loss, metrics) of the whole batch."""
    rows = slow_matrix(name, x, config, selected)
    mode = "seq-mean-token-mean" if name in ("sapo", "geo_mean") else config.loss_agg_mode
    flat = [(i, *entry) for i, row in enumerate(rows) for entry in row]
    z = [(x.log_probs[i, t] - x.old_log_probs[i, t]).item() for i, t, *_ in flat]
    bounded = name in ("vanilla", "cispo", "sapo", "dppo_tv", "dppo_kl")
    z = [min(max(value, -EXP_BOUND), EXP_BOUND) for value in z] if bounded else z
    metrics = {}
    if name != "gpg":
        metrics["actor/ppo_kl"] = sum(abs(value) if name == "kl_cov" else -value for value in z) / len(z)
    for place, key in ((3, "actor/pg_clipfrac"), (4, "actor/pg_clipfrac_lower")):
        if flat[0][place] is not None:
            metrics[key] = sum(bool(entry[place]) for entry in flat) / len(flat)
    return slow_aggregate(rows, mode, x.mask.shape[1]), metrics


def run(name, x, config, **given):
    loss, metrics = policy_loss_terms(x, config, Denominators.count(x.mask), **given)
    (gradient,) = torch.autograd.grad(loss, x.log_probs)
    return loss, gradient, metrics


def assert_matches(name, x, config, reference=None, selected=None):
    loss, gradient, metrics = run(name, x, config)
    slow, slow_metrics = slow_loss(reference or name, x if reference is None else bypassed(x, config), config, selected)
    (slow_gradient,) = torch.autograd.grad(slow, x.log_probs)
    torch.testing.assert_close(loss, slow, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, slow_gradient, rtol=1e-6, atol=1e-9)
    assert metrics.pop("actor/pg_loss").item() == pytest.approx(slow.item(), rel=1e-6)
    found = {key: value.item() for key, value in metrics.items() if key.startswith("actor/")}
    assert found == pytest.approx(slow_metrics, rel=1e-6, abs=1e-9)
    return metrics


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in ("clip_cov", "kl_cov", "bypass_mode")])
def test_loss_gradient_and_metrics_match_a_slow_loop(name, weighted):
    x = sample() if weighted else without_weights(sample())
    metrics = assert_matches(name, x, settings(name))
    if "actor/pg_clipfrac" in metrics and name not in ("sapo",):
        assert 0 < metrics["actor/pg_clipfrac"] < 1, "the sample must reach the clips"


@pytest.mark.parametrize("direction", [1, -1], ids=["up", "down"])
@pytest.mark.parametrize("name", ["vanilla", "sapo", "cispo", "dppo_tv", "dppo_kl", "gspo", "geo_mean", "dro"])
def test_log_ratios_far_apart_stay_finite_and_match_a_slow_loop(name, direction):
    x = without_weights(sample())
    shift = direction * torch.where(x.advantages > 0, 40.0, 25.0)
    new = (x.log_probs + shift.clamp(max=0)).detach().requires_grad_()
    far = LossInputs(new, x.old_log_probs - shift.clamp(min=0), x.advantages, x.mask)
    assert_matches(name, far, settings(name))
    assert run(name, far, settings(name))[1].isfinite().all()


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", ["vanilla", "gspo", "sapo", "geo_mean"])
def test_aggregation_follows_the_key_except_where_a_loss_fixes_it(name, mode):
    assert_matches(name, sample(1), settings(name, loss_agg_mode=mode))


def test_a_loss_has_a_default_aggregation_and_the_users_key_wins():
    x, unset, asked = sample(2), settings("reinforce", loss_agg_mode=None), settings("reinforce")
    slow = slow_matrix("reinforce", x, unset)
    assert run("reinforce", x, unset)[0].item() == pytest.approx(slow_aggregate(slow, "seq-mean-token-sum", 8).item())
    assert run("reinforce", x, asked)[0].item() == pytest.approx(slow_aggregate(slow, "token-mean", 8).item())
    assert POLICY_LOSS.get("gspo").modes(unset) == ("seq-mean-token-mean",) * 2
    assert POLICY_LOSS.get("sapo").modes(settings(loss_agg_mode="token-sum")) == ("seq-mean-token-mean", "token-sum")


def test_reinforce_is_the_log_probability_of_the_whole_response():
    x = sample(3)
    row_advantage = x.advantages[:, :1].expand_as(x.advantages)
    x = LossInputs(x.log_probs, x.old_log_probs, row_advantage, x.mask)
    loss, _, _ = run("reinforce", x, settings("reinforce", loss_agg_mode=None))
    response = (x.log_probs * x.mask).sum(-1)
    assert loss.item() == pytest.approx((-(row_advantage[:, 0] * response)[1:].mean()).item())


@pytest.mark.parametrize(
    "ratio,advantage,expected",
    [(1.6487, 1, -1.2), (1.648721, -1, 1.648721), (6.6859, -1, 3.0), (0.367879, 1, -0.367879), (0.3679, -1, 0.8)],
)
def test_golden_values_of_the_clipped_loss(ratio, advantage, expected):
    one = torch.ones(1, 1, dtype=torch.float64)
    x = LossInputs((one * math.log(ratio) - 1).requires_grad_(), -one, one * advantage, one)
    loss, _, _ = run("vanilla", x, settings(clip_ratio_high=None, clip_ratio_c=3.0))
    assert loss.item() == pytest.approx(expected, abs=1e-6)


# Clip-Cov and KL-Cov choose tokens by statistics of the whole mini-batch.


def slow_covariance(x):
    tokens = [(i, t) for i in range(len(x.mask)) for t in range(x.mask.shape[1]) if x.mask[i, t]]
    mean_a = sum(x.advantages[at].item() for at in tokens) / len(tokens)
    mean_p = sum(x.log_probs[at].item() for at in tokens) / len(tokens)
    return {at: (x.advantages[at].item() - mean_a) * (x.log_probs[at].item() - mean_p) for at in tokens}


def test_kl_cov_penalises_the_tokens_of_highest_covariance():
    x, config = sample(4), settings("kl_cov")
    cov = slow_covariance(x)
    top = sorted(cov, key=cov.get, reverse=True)[: int(0.25 * len(cov))]
    selected = POLICY_LOSS.get("kl_cov").choose(x, config)
    assert {tuple(at) for at in selected.nonzero().tolist()} == set(top)
    assert_matches("kl_cov", x, config, selected=selected)
    unset = settings("kl_cov", ppo_kl_coef=None)
    plain, penalised = run("kl_cov", x, settings("kl_cov", ppo_kl_coef=0.0))[0], run("kl_cov", x, unset)[0]
    extra = sum(abs(x.log_probs[at] - x.old_log_probs[at]).item() * x.weights[at].item() for at in top) / len(cov)
    assert (penalised - plain).item() == pytest.approx(extra)


def test_clip_cov_drops_a_random_share_of_the_unclipped_tokens_in_the_band():
    x, config = sample(4, rows=10), settings("clip_cov", clip_cov_ratio=0.1)
    cov = slow_covariance(x)
    open_tokens = set()
    for at, value in cov.items():
        r = math.exp((x.log_probs[at] - x.old_log_probs[at]).item())
        a = x.advantages[at].item()
        if 0.01 < value < 5.0 and not -a * clip(r, config) > -a * r:
            open_tokens.add(at)
    loss = POLICY_LOSS.get("clip_cov")
    selected = loss.choose(x, config, seed=1)
    picked = {tuple(at) for at in selected.nonzero().tolist()}
    assert picked < open_tokens and len(picked) == int(0.1 * len(cov))
    assert_matches("clip_cov", LossInputs(**(vars(x) | {"selected": selected})), config, selected=selected)
    draws = {tuple(loss.choose(x, config, seed=1, step=step).flatten().tolist()) for step in range(8)}
    assert len(draws) == 8, "every step draws anew"
    everything = loss.choose(x, settings("clip_cov", clip_cov_ratio=1.0))
    assert {tuple(at) for at in everything.nonzero().tolist()} == open_tokens
    assert loss.choose(x, settings("clip_cov", clip_cov_ratio=1e-6)).sum() == 1
    assert loss.choose(x, settings("clip_cov", clip_cov_lb=4.9)).sum() == 0


def test_a_random_choice_depends_on_row_ids_and_not_on_order_or_padding():
    x, config = sample(5), settings("clip_cov")
    loss, order = POLICY_LOSS.get("clip_cov"), torch.tensor([3, 0, 4, 1, 2])
    selected = loss.choose(x, config, seed=7, step=3)
    columns = {name: value for name, value in vars(x).items() if isinstance(value, torch.Tensor)}
    turned = LossInputs(**{name: value[order] for name, value in columns.items()})
    assert torch.equal(loss.choose(turned, config, seed=7, step=3), selected[order])
    padded = {name: pad(value) if value.dim() == 2 else value for name, value in columns.items()}
    assert torch.equal(loss.choose(LossInputs(**padded), config, seed=7, step=3)[:, :8], selected)


def pad(x):
    return torch.nn.functional.pad(x, (0, 2), value=0 if not x.is_floating_point() else math.nan)


# Bypass: correction inside the loss.


def bypassed(x, config):
    """The same inputs after the correction that the loss makes for itself."""
    plan = parse(config.policy_loss.rollout_correction)
    found = correction(x.log_probs.detach(), x.rollout_log_probs, x.mask, plan)
    weights = found.weights if plan.loss == "reinforce" else None
    return LossInputs(x.log_probs, x.rollout_log_probs, x.advantages, found.mask, weights)


@pytest.mark.parametrize(
    "keys,delegate",
    [
        ({"loss_type": "ppo_clip", "rollout_is": "token"}, "vanilla"),
        ({"loss_type": "reinforce"}, "reinforce"),
        ({"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": "0.8_1.3"}, "reinforce"),
        ({"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_batch_normalize": True}, "reinforce"),
    ],
)
def test_bypass_is_the_loss_it_names_against_the_rollout_policy(keys, delegate):
    config = settings("bypass_mode", rollout_correction=keys)
    metrics = assert_matches("bypass_mode", sample(6), config, reference=delegate)
    plan = parse(config.policy_loss.rollout_correction)
    x = sample(6)
    expected = correction(x.log_probs.detach(), x.rollout_log_probs, x.mask, plan).metrics
    found = {name: value.item() for name, value in metrics.items() if name.startswith("rollout_corr/")}
    assert found == pytest.approx({name: expected[name] for name in found})
    assert {"rollout_corr/kl", "rollout_corr/k3_kl"} <= found.keys()
    assert ("rollout_corr/rollout_is_mean" in found) == ("rollout_is" in keys)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_bypass_takes_rejected_tokens_out_of_the_mask_and_counts_the_mini_batch_before(mode):
    keys = {"loss_type": "ppo_clip", "rollout_rs": "token_k1", "rollout_rs_threshold": "1.25"}
    config, x = settings("bypass_mode", loss_agg_mode=mode, rollout_correction=keys), sample(6)
    inner = bypassed(x, config)
    assert 0 < inner.mask.sum() < x.mask.sum()
    matrix, kept, _ = evaluate(POLICY_LOSS.get("vanilla"), inner, config)
    loss, _, metrics = run("bypass_mode", x, config)
    torch.testing.assert_close(loss, aggregate(matrix, kept, mode, Denominators.count(x.mask)))
    share = 1 - (inner.mask.sum() / x.mask.sum()).item()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].item() == pytest.approx(share)


# What a user can get wrong.


def test_an_unknown_loss_is_refused_with_a_suggestion():
    with pytest.raises(UserError, match="did you mean 'vanilla'"):
        run("vanila", sample(), settings("vanila"))


@pytest.mark.parametrize("beta", [None, 0.0, -1.0])
def test_dro_needs_a_positive_beta(beta):
    with pytest.raises(UserError, match="dro_beta"):
        run("dro", sample(), settings("dro", dro_beta=beta))


def test_the_dual_clip_must_lie_above_one():
    with pytest.raises(UserError, match="clip_ratio_c"):
        run("vanilla", sample(), settings(clip_ratio_c=1.0))


def test_bypass_without_its_options_is_refused():
    config = settings("bypass_mode")
    config.policy_loss.rollout_correction = None
    with pytest.raises(UserError, match="rollout_correction"):
        run("bypass_mode", sample(), config)


def test_the_schema_names_exactly_the_losses_there_are_and_they_are_tested_here():
    assert set(LOSSES) == set(POLICY_LOSSES) <= set(POLICY_LOSS.names())


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "bypass_mode"])
def test_every_loss_runs_on_the_schemas_own_config(name):
    config = ActorConfig()
    config.policy_loss.loss_mode, config.policy_loss.dro_beta = name, 0.1
    loss, gradient, _ = run(name, sample(), config)
    assert loss.isfinite() and gradient.abs().sum() > 0
