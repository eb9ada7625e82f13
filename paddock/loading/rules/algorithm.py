"""Rules on estimators, losses, correction and routers."""

from __future__ import annotations

from paddock.config import rollout_correction
from paddock.config.roles import DECLARED_LOSSES, POLICY_LOSSES
from paddock.config.schema import Config
from paddock.config.topology import estimator_needs
from paddock.errors import UserError
from paddock.loading.rules.form import Scope, rule
from paddock.loading.rules.limits import unknown

_A = "actor_rollout_ref.actor"
_M = "actor_rollout_ref.model"
_RO = "actor_rollout_ref.rollout"


@rule
def estimator_gets_its_groups(config: Config) -> None:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if "groups" in estimator_needs(config) and n < 2:
        raise UserError(
            f"{estimator} compares the responses to one prompt with each other, and one response has no other",
            key=f"{_RO}.n",
            value=n,
            fix=f"{_RO}.n=5, or an estimator without groups (algorithm.adv_estimator=gae)",
        )


@rule
def estimator_gets_its_critic(config: Config) -> None:
    if "critic" in estimator_needs(config) and not config.critic.enable:
        raise UserError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a critic",
            key="critic.enable",
            value=config.critic.enable,
            fix="leave critic.enable out, or choose an estimator without a critic (grpo, rloo)",
        )


@rule
def estimator_gets_its_components(config: Config) -> None:
    algorithm = config.algorithm
    needs = estimator_needs(config)
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if "reward_components" in needs and not keys:
        raise UserError(
            "gdpo normalises reward components, and none is named",
            key="algorithm.gdpo_reward_keys",
            value=keys,
            fix="algorithm.gdpo_reward_keys=[accuracy,format]: keys of the dict that your scorer returns; or several "
            "functions, each of which is a component: custom_reward_function.path=[a.py,b.py]",
        )
    if weights is not None and len(weights) != len(keys):
        raise UserError(
            f"there are {len(keys)} components and {len(weights)} weights",
            key="algorithm.gdpo_reward_weights",
            value=weights,
            fix="one weight for each of algorithm.gdpo_reward_keys",
        )


@rule
def losses_have_what_they_need(config: Config) -> None:
    loss, key = config.actor_rollout_ref.actor.policy_loss, f"{_A}.policy_loss"
    known = {*POLICY_LOSSES, *DECLARED_LOSSES}
    if loss.loss_mode not in known and not config.actor_rollout_ref.model.external_lib:
        raise unknown("policy loss", f"{key}.loss_mode", loss.loss_mode, POLICY_LOSSES)
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        raise UserError(
            "loss_mode=dro has no default weight", key=f"{key}.dro_beta", value="null", fix=f"{key}.dro_beta=0.1"
        )
    if loss.loss_mode == "bypass_mode" and not rollout_correction.parse(config.algorithm.rollout_correction).bypass:
        raise UserError(
            "this loss compares with the rollout policy directly",
            key=f"{key}.loss_mode",
            value=loss.loss_mode,
            fix="algorithm.rollout_correction.bypass_mode=True",
        )


@rule
def correction_can_be_read(config: Config) -> None:
    rollout_correction.parse(config.algorithm.rollout_correction)


@rule
def replayed_experts_are_recorded(config: Config) -> None:
    """R3 replays what the rollout chose, R2 what the pass of the old log-probs chose."""
    group, key = config.actor_rollout_ref, "actor_rollout_ref.actor.router_replay.mode"
    recorded = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    if group.actor.router_replay.mode == "R3" and not group.rollout.enable_rollout_routing_replay:
        raise UserError("replays the rollout's experts, which nobody records", key=key, value="R3", fix=recorded)
    if group.actor.router_replay.mode == "R2" and rollout_correction.parse(config.algorithm.rollout_correction).bypass:
        raise UserError(
            "replays the experts of the old log-probs' pass, which bypass mode leaves out",
            key=key,
            value="R2",
            fix=f"{key}=R3 {recorded}; or algorithm.rollout_correction.bypass_mode=False",
        )


@rule(Scope.TRAINING)
def routers_are_balanced_by_the_engine(config: Config) -> None:
    """Refuses transformers' own loss of routers: it is a mean over whatever micro-batch a forward happens to have."""
    if config.actor_rollout_ref.model.override_config.get("output_router_logits"):
        raise UserError(
            "routers are balanced over the whole mini-batch, by a loss of this engine's own",
            key=f"{_M}.override_config.output_router_logits",
            value=True,
            fix=f"{_M}.override_config.router_aux_loss_coef=0.001",
        )
