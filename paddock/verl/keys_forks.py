"""Rules for keys of verl's first surface (early 2025) and of the public projects that grew from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paddock.loading.foreign import Converted, Ignored, KeyRule, Refused, Several, moved, table

_A, _RO, _M = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))
_FUNCTION = "custom_reward_function"


def _sampled(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """A temperature above 0 sampled in validation, without a key of its own for it."""
    return {f"{_RO}.val_kwargs.temperature": value, f"{_RO}.val_kwargs.do_sample": float(value) > 0}


def _only_newest(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    return {f"trainer.max_{role}_ckpt_to_keep": 1 for role in ("actor", "critic")} if value else {}


def _of_the_function(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Further arguments of a manager are the function's, if there is one; else the key is as unknown as it was."""
    name = key.removeprefix("reward_model.")
    return {f"{_FUNCTION}.{name}" if given.get(f"{_FUNCTION}.path") else key: value}


ADVICE = "reward loops and batches of your own are written with the library: docs/en/library.md"

RENAMED = {
    "@rollout.n_val": "@rollout.val_kwargs.n",
    "@rollout.n_agent": "@rollout.n",
    "data.n_samples": "@rollout.n",
    "@rollout.multi_turn.max_turns": "@rollout.multi_turn.max_assistant_turns",
    "@ref.param_offload": "@ref.fsdp_config.param_offload",
    "reward_model.param_offload": "reward_model.model.fsdp_config.param_offload",
    "@actor.{loss_mode,clip_cov_ratio,clip_cov_lb}": "@actor.policy_loss.{loss_mode,clip_cov_ratio,clip_cov_lb}",
    "@actor.{clip_cov_ub,kl_cov_ratio,ppo_kl_coef}": "@actor.policy_loss.{clip_cov_ub,kl_cov_ratio,ppo_kl_coef}",
    "{@actor,critic}.checkpoint.contents": "{@actor,critic}.checkpoint.save_contents",
    "algorithm.grpo_use_std": "algorithm.norm_adv_by_std_in_grpo",
    "data.shuffle_train_dataloader": "data.shuffle",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
    "ray_init.*": "ray_kwargs.ray_init.*",
}
CONVERTED: dict[str, KeyRule] = {
    "@actor.k_percent": Converted(
        f"{_A}.policy_loss.kl_cov_ratio", lambda key, value, given: float(value) / 100, "in percent; here a share"
    ),
    "@rollout.val_temperature": Several(_sampled, "a temperature above 0 samples"),
    "trainer.{remove_previous_ckpt,remove_previous_ckpt_in_save}": Several(
        _only_newest, "the newest checkpoint alone is kept"
    ),
    "reward_model.reward_kwargs.*": Several(_of_the_function, "an argument of the reward function"),
}
IGNORED: dict[str, KeyRule] = {
    "FSDP.grad_offload": Ignored("gradients are freed after each optimizer step: none is left to offload"),
    "reward_model.model.fsdp_config.min_num_params": Ignored("a reward model lies whole on each device"),
    "*._target_": Ignored("every section has the class that it has in the schema"),
    "critic.kl_ctrl.*": Ignored("KL in the reward is weighted by algorithm.kl_ctrl"),
    "@rollout.{micro_rollout_batch_size,swap_space} @rollout.engine_kwargs.swap_space": Ignored(
        "the engine decides it by its own memory"),
    "@ref.use_ref": Ignored("the reference is loaded if a KL term has a weight"),
    "@ref.use_remove_padding": Ignored(f"follows {_M}.use_remove_padding"),
    "{@model,critic.model}.gradient_checkpointing_kwargs.*": Ignored(
        "enable_gradient_checkpointing recomputes layer by layer"),
    "trainer.max_optim_to_keep": Ignored("a checkpoint is kept whole: trainer.max_actor_ckpt_to_keep"),
    "trainer.wandb_mode": Ignored("WANDB_MODE is wandb's own variable"),
    "trainer.{stats_*,rl_logging_board_dir}": Ignored("trainer.rollout_data_dir=FOLDER keeps every rollout as jsonl"),
    "trainer.tensorboard_dir": Ignored("TENSORBOARD_DIR is the logger's own variable"),
    "trainer.rejection_sample_multiplier @actor.adaptive_entropy.* "
    "data.{accuracy_lower_bound,accuracy_upper_bound,max_obs_length,max_start_length} "
    "algorithm.state_masking.*": Ignored("only beside a key that is refused"),
    "@actor.state_masking": Ignored("what an environment wrote is never trained on"),
}  # fmt: skip
REFUSED: dict[str, KeyRule] = {
    "@rollout.agent.agent_loop_manager_class": Refused(
        "loops are led by Paddock's own manager", f"{_RO}.agent.agent_loop_config_path"),
    "MEGATRON.num_layers_per_virtual_pipeline_stage": Refused(
        "a pipeline rank has one run of layers", "leave it out: it changes no result"),
    "trainer.rejection_sample": Refused(
        "groups without a difference are drawn anew, not dropped",
        "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc", (None, False)),
    "trainer.remove_clip data.filter_truncated *.mask_truncated_samples": Refused(
        "responses that were cut are not taken out of the loss",
        "leave it out; reward_model.reward_kwargs.overlong_buffer_cfg.enable=True pays less for them", (None, False)),
    "@actor.adaptive_entropy.enabled": Refused(
        "the weight of the entropy bonus is constant", f"{_A}.entropy_coeff=0.001", (None, False)),
    "data.filter_accuracy": Refused(
        "groups are filtered if all their rewards are equal, not by bounds of their accuracy",
        "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc", (None, False)),
    "data.oversample_factor": Refused(
        "a step draws data.train_batch_size prompts", "algorithm.filter_groups", (None, False, 1, 1.0)),
    "reward_model.{prime_*,rm_*,mini_batch_size} reward_model.model.{update,beta_train,loss_type,ref_*} "
    "reward_model.model.optim.* algorithm.adv_params.* verifier.*": Refused(
        "implicit process rewards, which train a reward model beside the policy (PRIME), are not built",
        "a reward model that stays as it is: reward_model.model.path", (None, False)),
    "@rollout.{prefix_*,n_prefix,max_prefix_*,min_prefix_*} "
    "@actor.{use_off_policy_*,off_policy_*,use_sft_*,sft_*}": Refused(
        "demonstrations among the responses of a group, off-policy, are not built",
        ADVICE, (None, False)),
    "@actor.loss_remove_clip": Refused(
        "a clip range is always there", f"{_A}.clip_ratio=10: none is reached", (None, False)),
    "@actor.loss_remove_token_mean": Refused(
        "sums over tokens are divided by rows, too", f"{_A}.loss_agg_mode=seq-mean-token-sum-norm", (None, False)),
    "trainer.{experience*,exp_*}": Refused(
        "responses of earlier steps are not replayed (ExGRPO)",
        ADVICE, (None, False)),
    "@actor.skip_grad_bound": Refused(
        "a step with a large gradient is clipped", f"{_A}.optim.clip_grad=1.0", (None, False)),
    "do_search max_turns retriever.*": Refused(
        "a search engine is an environment or a tool here, not a key (Search-R1)",
        "environment=FILE:Class: docs/en/environments.md", (None, False)),
    "data.{train_data_num,val_data_num}": Refused(
        "a random part of the rows is not drawn", "data.train_max_samples", (None, False)),
    "algorithm.no_think_rl": Refused("responses are trained on as they were drawn", "leave it out", (None, False)),
    "reward_config.* data.reward_impl_version "
    "reward_model.{structure_format_score,final_format_score,retrieval_score}": Refused(
        "is an argument of a scorer that comes with another project",
        "custom_reward_function.path=FILE custom_reward_function.reward_kwargs.NAME=value", (None, False, 0)),
    "data.system_prompt": Refused(
        "messages are taken as the rows have them", "write it into the rows", (None, False)),
    "data.min_response_length": Refused("is no limit here", "leave it out", (None, False, 0)),
    "@rollout.use_fire_sampling": Refused("the first token is drawn as all others", "leave it out", (None, False)),
    "@rollout.chat_scheduler": Refused(
        "conversations are led by environments and agent loops",
        f"environment=FILE:Class, or {_RO}.agent.agent_loop_config_path",
        (None, "verl.trainer.naive_chat_scheduler.NaiveChatCompletionScheduler")),
    "async_training.* async_resources.* async_flow.* rollout.{nnodes,n_gpus_per_node,total_rollout_steps}": Refused(
        "engines in a pool of their own do not run ahead yet",
        "python3 -m verl.trainer.main_ppo algorithm.staleness=1, which draws ahead on the trainer's devices",
        (None, False)),
    "teacher.* @teacher.*": Refused(
        "a teacher runs within the run, without a server",
        "distillation.enabled=True distillation.teacher_models: docs/en/distillation.md", (None, False)),
    "@rollout.engine_kwargs.dynamo*": Refused("Dynamo is not an engine here", "use rollout.name=vllm", (None, {})),
    "reward_model.elliptical.*": Refused(
        "rewards of exploration by a covariance are not built",
        "a reward function of your own: custom_reward_function.path", (None, False)),
    "algorithm.rollout_correction.rollout_rs_threshold_lower": Refused(
        "both bounds are written as one value",
        "algorithm.rollout_correction.rollout_rs_threshold=0.99_1.01, and rollout_rs=seq_mean_k1 for `geometric`",
        (None, False)),
    "algorithm.rollout_correction.rollout_token_veto_threshold": Refused(
        "a single token does not void its response",
        "algorithm.rollout_correction.rollout_rs=token_k1 with a rollout_rs_threshold", (None, False)),
}  # fmt: skip
FORKS = {**moved(RENAMED), **table(CONVERTED), **table(IGNORED), **table(REFUSED)}
