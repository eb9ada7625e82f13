"""Rules on estimators, losses, correction, rollouts that run ahead, and routers."""

from __future__ import annotations

from collections.abc import Iterator

from paddock.config import rollout_correction
from paddock.config.roles import DECLARED_LOSSES, POLICY_LOSSES
from paddock.config.schema import Config
from paddock.config.topology import anchors_at_rollout, corrects_rollout, engine_size, estimator_needs
from paddock.loading.rules.form import Breach, Scope, rule
from paddock.loading.rules.limits import unknown

_A = "actor_rollout_ref.actor"
_M = "actor_rollout_ref.model"
_RO = "actor_rollout_ref.rollout"
AHEAD = "algorithm.staleness"


@rule
def estimators_get_what_they_need(config: Config) -> Iterator[Breach]:
    algorithm, needs = config.algorithm, estimator_needs(config)
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    estimator = algorithm.adv_estimator
    if "groups" in needs and config.actor_rollout_ref.rollout.n < 2:
        reason = f"{estimator} compares the responses to one prompt with each other, and one response has no other"
        yield f"{_RO}.n", reason, f"{_RO}.n=5, or an estimator without groups (algorithm.adv_estimator=gae)"
    if "critic" in needs and not config.critic.enable:
        fix = "leave critic.enable out, or choose an estimator without a critic (grpo, rloo)"
        yield "critic.enable", f"algorithm.adv_estimator={estimator} needs a critic", fix
    if "reward_components" in needs and not keys:
        yield (
            "algorithm.gdpo_reward_keys",
            "gdpo normalises reward components, and none is named",
            "algorithm.gdpo_reward_keys=[accuracy,format]: keys of the dict that your scorer returns; or several "
            "functions, each of which is a component: custom_reward_function.path=[a.py,b.py]",
        )
    if weights is not None and len(weights) != len(keys):
        reason = f"there are {len(keys)} components and {len(weights)} weights"
        yield "algorithm.gdpo_reward_weights", reason, "one weight for each of algorithm.gdpo_reward_keys"


@rule
def losses_have_what_they_need(config: Config) -> Iterator[Breach]:
    loss, key = config.actor_rollout_ref.actor.policy_loss, f"{_A}.policy_loss"
    known = {*POLICY_LOSSES, *DECLARED_LOSSES}
    if loss.loss_mode not in known and not config.actor_rollout_ref.model.external_lib:
        raise unknown("policy loss", f"{key}.loss_mode", loss.loss_mode, POLICY_LOSSES)
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        yield f"{key}.dro_beta", "loss_mode=dro has no default weight", f"{key}.dro_beta=0.1", "null"
    if loss.loss_mode == "bypass_mode" and not rollout_correction.parse(config.algorithm.rollout_correction).bypass:
        fix = "algorithm.rollout_correction.bypass_mode=True"
        yield f"{key}.loss_mode", "this loss compares with the rollout policy directly", fix


@rule
def correction_can_be_read(config: Config) -> None:
    rollout_correction.parse(config.algorithm.rollout_correction)


@rule(Scope.UPDATES)
def rollouts_may_run_ahead(config: Config) -> Iterator[Breach]:
    """Refuses what has no meaning for tokens of older weights, and what cannot interrupt its responses."""
    group, algorithm, fix = config.actor_rollout_ref, config.algorithm, f"{AHEAD}=0"
    loss = config.distillation.distillation_loss
    if not algorithm.staleness:
        return
    if "greedy_baseline" in estimator_needs(config):
        yield AHEAD, f"{algorithm.adv_estimator} compares a response with a greedy one of the same weights", fix
    if config.distillation.enabled and not loss.use_policy_gradient:
        reason = "the divergence from a teacher is a loss of the current policy's own tokens"
        yield AHEAD, reason, f"{fix}, or distillation.distillation_loss.use_policy_gradient=True"
    if group.rollout.deterministic:
        yield AHEAD, "conversations that wait for each other cannot be of several steps", fix
    if engine_size(config) > 1:
        yield AHEAD, "engines over several devices do not run ahead yet", fix
    filters, needed = algorithm.filter_groups.enable, config.data.train_batch_size * algorithm.staleness
    if filters and (config.data.gen_batch_size or 0) > needed:
        reason = f"a round of more prompts than staleness x data.train_batch_size = {needed} makes groups older"
        yield "data.gen_batch_size", reason, f"data.gen_batch_size={needed}"


@rule(Scope.UPDATES)
def old_tokens_are_corrected(config: Config) -> Iterator[Breach]:
    """Rollouts that run ahead always have a correction in force."""
    off = config.algorithm.rollout_correction.preset == "disabled"
    if config.algorithm.staleness and (off or not (corrects_rollout(config) or anchors_at_rollout(config))):
        reason = f"tokens are up to {config.algorithm.staleness} updates old, and nothing corrects for that"
        yield "algorithm.rollout_correction.preset", reason, "leave it out, or algorithm.staleness=0"


@rule
def replayed_experts_are_recorded(config: Config) -> Iterator[Breach]:
    """R3 replays what the rollout chose, R2 what the pass of the old log-probs chose."""
    group, key = config.actor_rollout_ref, f"{_A}.router_replay.mode"
    recorded = f"{_RO}.enable_rollout_routing_replay=True"
    if group.actor.router_replay.mode == "R3" and not group.rollout.enable_rollout_routing_replay:
        yield key, "replays the rollout's experts, which nobody records", recorded
    if group.actor.router_replay.mode == "R2" and rollout_correction.parse(config.algorithm.rollout_correction).bypass:
        reason = "replays the experts of the old log-probs' pass, which bypass mode leaves out"
        yield key, reason, f"{key}=R3 {recorded}; or algorithm.rollout_correction.bypass_mode=False"


@rule(Scope.TRAINING)
def routers_are_balanced_by_the_engine(config: Config) -> Iterator[Breach]:
    """Refuses transformers' own loss of routers: it is a mean over whatever micro-batch a forward happens to have."""
    if config.actor_rollout_ref.model.override_config.get("output_router_logits"):
        reason = "routers are balanced over the whole mini-batch, by a loss of this engine's own"
        key = f"{_M}.override_config"
        yield f"{key}.output_router_logits", reason, f"{key}.router_aux_loss_coef=0.001"
